"""The equation of an einsum, checked against its operands."""

from collections.abc import Sequence
from typing import Any

import opt_einsum


def parse(eqn: str, operands: Sequence[Any]) -> tuple[list[str], str]:
    """Returns the letters of operands and of the output, with ellipses expanded.

    Args:
        eqn: the equation.
        operands: arrays or `QTensor`s.

    Raises:
        TypeError: if `eqn` is no string.
        ValueError: if it is not of two or more operands, or does not fit the operands.
    """
    if not isinstance(eqn, str):
        raise TypeError(f"eqn must be a string, got {type(eqn).__name__}")
    count = eqn.count(",") + 1
    if count == 1:
        raise ValueError(
            f"einsum equation {eqn!r} has 1 operands; a quantized einsum takes two or "
            "more"
        )
    if count != len(operands):
        raise ValueError(
            f"einsum equation {eqn!r} has {count} operands, and {len(operands)} were "
            "given"
        )
    shapes = [tuple(x.shape) for x in operands]
    given = f"{', '.join(map(str, shapes[:-1]))} and {shapes[-1]}"
    try:
        inputs, out, _ = opt_einsum.parser.parse_einsum_input(
            (eqn, *shapes), shapes=True
        )
    except ValueError as error:
        raise ValueError(
            f"einsum equation {eqn!r} does not fit operands of shapes {given}: {error}"
        ) from error
    names = inputs.split(",")
    sizes: dict[str, int] = {}
    for letters, shape in zip(names, shapes, strict=True):
        if len(letters) != len(shape):
            raise ValueError(
                f"einsum equation {eqn!r} names {len(letters)} axes of an operand of "
                f"shape {shape}"
            )
        for letter, size in zip(letters, shape, strict=True):
            known = sizes.setdefault(letter, size)
            if known != size and 1 not in (known, size):
                raise ValueError(
                    f"einsum equation {eqn!r}: axis {letter!r} has size {known} and "
                    f"size {size} in operands of shapes {given}"
                )
            sizes[letter] = max(known, size)
    if len(set(out)) != len(out):
        raise ValueError(f"einsum equation {eqn!r} names an output axis twice")
    return names, out
