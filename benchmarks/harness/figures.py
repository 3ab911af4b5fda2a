"""One measured figure, as tables and JSON hold it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from benchmarks.harness.timing import Spread

BARE = "bare int8"
"""The contestant that runs the integer contractions and nothing else."""

FLOOR = "floor"
"""The same plus the traffic of quantization; see `benchmarks.harness.floor`."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """One contestant in one case of one workload."""

    workload: str
    case: Mapping[str, Any]
    """What was measured, such as ``{"width": 512, "phase": "forward"}``."""
    contestant: str
    unit: str
    """"s", "bytes" or "relative error"."""
    median: float
    lower_quartile: float
    upper_quartile: float
    repeats: int
    relative: float | None = None
    """The median over that of the case's first contestant (float32, where it runs)."""
    share_of_floor: float | None = None
    """The floor's median over this one: 1.0 is as fast as the bare contractions."""


def compare(
    workload: str,
    case: Mapping[str, Any],
    spreads: Mapping[str, Spread],
    unit: str = "s",
) -> list[Figure]:
    """The figures of one case.

    Args:
        workload: its name.
        case: what was measured.
        spreads: by contestant. All are related to the first of them, and to `FLOOR` if
            it is one.
        unit: of the spreads.
    """
    first = next(iter(spreads.values())).median
    floor = spreads.get(FLOOR)
    return [
        Figure(
            workload=workload,
            case=case,
            contestant=name,
            unit=unit,
            **dataclasses.asdict(measured),
            relative=measured.median / first if first else None,
            share_of_floor=floor.median / measured.median if floor else None,
        )
        for name, measured in spreads.items()
    ]


def exact(
    workload: str, case: Mapping[str, Any], values: Mapping[str, float], unit: str
) -> list[Figure]:
    """The figures of one case whose values have no spread, such as bytes."""
    spreads = {name: Spread(value, value, value, 1) for name, value in values.items()}
    return compare(workload, case, spreads, unit)
