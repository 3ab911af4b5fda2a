"""Collectives of a compiled program, read from its HLO text."""

import dataclasses
import math
import re
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program."""

    kind: str
    results: tuple[tuple[str, tuple[int, ...]], ...]
    """Dtype and shape of each result."""
    times: int = 1
    """Executions: the product of the trip counts of the enclosing loops."""

    @property
    def bytes(self) -> int:
        """Bytes of the results on one device, over all executions."""
        sizes = (_bits(dtype) * math.prod(shape) for dtype, shape in self.results)
        return self.times * sum(sizes) // 8


def _bits(dtype: str) -> int:
    return 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype.partition("e")[0]))


_KINDS = (
    "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|"
    "collective-broadcast|ragged-all-to-all"
)
_COLLECTIVE = re.compile(rf" = (.*?) ({_KINDS})(?:-start)?\(")
_RESULT = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{\s*$")
_CALLED = re.compile(
    r"(?:to_apply|body|condition|calls|branch_computations)=\{?((?:%?[\w.\-]+(?:, )?)+)"
)
_TRIPS = re.compile(r'known_trip_count.*?"n":"(\d+)"')


def count(hlo: str) -> list[Collective]:
    """Collectives of a compiled program, given as `compiled.as_text()`."""
    found: list[tuple[str, Collective]] = []
    callers: dict[str, tuple[str, int]] = {}
    inside = ""
    for line in hlo.splitlines():
        if (header := _COMPUTATION.match(line)) and not line.startswith(" "):
            inside = header[1]
            continue
        trips = int(known[1]) if (known := _TRIPS.search(line)) else 1
        for called in _CALLED.finditer(line):
            for name in called[1].replace("%", "").split(", "):
                callers[name] = inside, trips
        if collective := _COLLECTIVE.search(line):
            results = tuple(
                (dtype, tuple(int(size) for size in sizes.split(",") if size))
                for dtype, sizes in _RESULT.findall(collective[1])
            )
            found.append((inside, Collective(collective[2], results)))
    return [
        dataclasses.replace(one, times=_times(computation, callers))
        for computation, one in found
    ]


def _times(computation: str, callers: Mapping[str, tuple[str, int]]) -> int:
    times = 1
    while computation in callers:
        computation, trips = callers[computation]
        times *= trips
    return times
