"""Figures as tables and as JSON."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import rich.box
from rich.console import Console
from rich.table import Table

from benchmarks.harness.figures import Figure

PHASE = "phase"
"""Parameter of a case that becomes columns."""

WIDTH = 200
"""Width of tables written to a file."""

_UNITS = {
    "s": ("ms", 1e3),
    "bytes": ("MB", 1e-6),
    "relative error": ("%", 1e2),
    "nats": ("millinats", 1e3),
    "operations": ("count", 1),
}


def console() -> Console:
    """Console of the terminal, or a wide one if output goes to a file."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=WIDTH)


def table(figures: Sequence[Figure], *, markdown: bool = False) -> Table:
    """Table of one workload.

    One row per case and contestant, with columns for each phase. A cell has the median
    and, in brackets, the quartiles.

    Args:
        figures: figures of one workload.
        markdown: use Markdown instead of lines.
    """
    first = figures[0]
    labels = [name for name in first.case if name != PHASE]
    phases = list(dict.fromkeys(figure.case.get(PHASE, "median") for figure in figures))
    floored = any(figure.share_of_floor is not None for figure in figures)

    drawn = Table(
        title=None if markdown else first.workload,
        box=rich.box.MARKDOWN if markdown else rich.box.SIMPLE,
    )
    for label in (*labels, ""):
        drawn.add_column(label)
    for phase in phases:
        own = next(f for f in figures if f.case.get(PHASE, "median") == phase)
        unit, _ = _UNITS[own.unit]
        drawn.add_column(f"{phase}, {unit}", justify="right", no_wrap=True)
        drawn.add_column("relative", justify="right")
        if floored:
            drawn.add_column("of floor", justify="right")

    rows: dict[tuple[Any, ...], dict[Any, Figure]] = {}
    for figure in figures:
        key = (*(figure.case[label] for label in labels), figure.contestant)
        rows.setdefault(key, {})[figure.case.get(PHASE, "median")] = figure
    previous: tuple[Any, ...] | None = None
    for key, row in rows.items():
        if previous is not None and key[:-1] != previous and not markdown:
            drawn.add_section()
        previous = key[:-1]
        cells = [cell for phase in phases for cell in _cells(row.get(phase), floored)]
        drawn.add_row(*map(str, key), *cells)
    return drawn


def _cells(figure: Figure | None, floored: bool) -> list[str]:
    if figure is None:  # Not every contestant has every phase.
        return [""] * (3 if floored else 2)
    _, factor = _UNITS[figure.unit]
    text = _number(figure.median * factor)
    if figure.repeats > 1:
        quartiles = (figure.lower_quartile, figure.upper_quartile)
        lower, upper = (_number(value * factor) for value in quartiles)
        text += f" ({lower}-{upper})"
    relative = figure.relative
    cells = [text, "" if relative is None else f"{relative:.2f} x"]
    if floored:
        share = figure.share_of_floor
        cells.append("" if share is None else f"{share:.0%}")
    return cells


def _number(value: float) -> str:
    """Formats a number with three digits and no exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def write_json(
    path: pathlib.Path,
    figures: Sequence[Figure],
    *,
    machine: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Write all figures as JSON.

    Args:
        path: file to write.
        figures: figures of all workloads.
        machine: see `benchmarks.harness.machine`.
        options: options of the run.
    """
    document = {
        "machine": machine,
        "options": options,
        "figures": [dataclasses.asdict(figure) for figure in figures],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
