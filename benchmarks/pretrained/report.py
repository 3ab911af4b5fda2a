"""Tables of the figures, on the terminal and on a page."""

from collections.abc import Sequence

import rich.box
from rich.table import Table

from benchmarks.pretrained.records import Record

COLUMNS = ("metric", "dB", "bytes", "time, of float", "of onnxruntime's")


def table(title: str, records: Sequence[Record], *, markdown: bool) -> Table:
    """The table of a network, with a row for each contestant."""
    drawn = Table(title=title, box=rich.box.MARKDOWN if markdown else rich.box.SIMPLE)
    for name in ("", *COLUMNS):
        drawn.add_column(name, justify="right" if name else "left")
    for one in records:
        drawn.add_row(*cells(one))
    return drawn


def page_table(records: Sequence[Record]) -> str:
    """The table of a network in Markdown."""
    rows = [("", *COLUMNS), ("---", *["---:"] * len(COLUMNS)), *map(cells, records)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def cells(record: Record) -> list[str]:
    """The row of a contestant."""
    if record.figures is None:
        return [f"{record.contestant}: {record.refused}", *[""] * len(COLUMNS)]
    figures = record.figures
    times = [f"{figures.times[name]:.2f} x" for name in figures.times]
    return [
        record.contestant,
        f"{figures.metric:.2f}",
        "" if figures.decibels is None else f"{figures.decibels:.1f}",
        "" if figures.in_float is None else f"{figures.in_float:.3f}",
        *(times or [""] * 2),
    ]
