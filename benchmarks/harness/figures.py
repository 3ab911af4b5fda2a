"""Measured figures, the records behind tables and JSON."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from benchmarks.harness.timing import Spread

BARE = "bare int8"
"""Contestant: the integer contractions alone."""

FLOOR = "floor"
"""`BARE` plus the memory traffic of quantization; see `benchmarks.harness.floor`."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """The measurement of one contestant in one case of a workload."""

    workload: str
    case: Mapping[str, Any]
    """Parameters of the case, such as ``{"width": 512, "phase": "forward"}``."""
    contestant: str
    unit: str
    """"s", "bytes", "operations", "relative error" or "nats"."""
    median: float
    lower_quartile: float
    upper_quartile: float
    repeats: int
    relative: float | None = None
    """Median divided by that of the case's first contestant (float32 if it runs)."""
    share_of_floor: float | None = None
    """Floor's median divided by this one: 1.0 is as fast as the bare contractions."""


def compare(
    workload: str,
    case: Mapping[str, Any],
    spreads: Mapping[str, Spread],
    unit: str = "s",
) -> list[Figure]:
    """Figures of one case.

    Args:
        workload: name of the workload.
        case: parameters of the case.
        spreads: spreads by contestant. The first is the baseline; `FLOOR`, if present,
            is the lower bound.
        unit: unit of the spreads.
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
    """Figures of a case with exact values, such as bytes."""
    spreads = {name: Spread(value, value, value, 1) for name, value in values.items()}
    return compare(workload, case, spreads, unit)
