"""Arrays and computations in the text of a compiled program (HLO)."""

import math
import re

Array = tuple[str, tuple[int, ...]]
"""Dtype, as HLO calls it, and shape."""

_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{\s*$")


def computations(program: str) -> dict[str, list[str]]:
    """The lines of each computation, by its name."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in program.splitlines():
        if (header := _COMPUTATION.match(line)) and not line.startswith(" "):
            lines = found.setdefault(header[1], [])
        else:
            lines.append(line)
    return found


def arrays(types: str) -> tuple[Array, ...]:
    """The arrays of a type.

    >>> arrays("(f32[8,2]{1,0}, s8[])")
    (('f32', (8, 2)), ('s8', ()))
    """
    return tuple(
        (dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in _ARRAY.findall(types)
    )


def bytes_of(array: Array) -> int:
    """Bytes of an array, with 4-bit elements two to a byte.

    >>> bytes_of(("s4", (3, 5)))
    8
    """
    dtype, shape = array
    return -(-_bits(dtype) * math.prod(shape) // 8)


def _bits(dtype: str) -> int:
    if dtype in ("token", "opaque"):
        return 0
    return 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype.partition("e")[0]))
