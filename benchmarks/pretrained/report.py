"""Tables of the figures, on the terminal and on a page."""

import pathlib
from collections.abc import Mapping, Sequence

import rich.box
from rich.table import Table

from benchmarks.pretrained.records import Record

COLUMNS = ("metric", "dB", "bytes", "time, of float", "of onnxruntime's")


class PageError(Exception):
    """A page cannot be written; the message has the reason."""


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


def write_page(path: pathlib.Path, tables: Mapping[str, str]) -> None:
    """Put tables between the marker lines of a page.

    Args:
        path: the page.
        tables: tables in Markdown by the name of their network.

    Raises:
        PageError: if the page lacks markers; nothing is written then.
    """
    page = path.read_text() if path.exists() else ""
    for name, text in tables.items():
        first, last = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, begin, rest = page.partition(first)
        _, end, after = rest.partition(last)
        if not (begin and end):
            raise PageError(f"{path} needs the lines {first} and {last}")
        page = f"{before}{first}\n\n{text}\n\n{last}{after}"
    path.write_text(page)
