"""Tables of figures for terminals and notebooks."""

import math
import sys
from typing import Any

import rich.box
import rich.console
import rich.table
import rich.text

from aqtlite.output import tables
from aqtlite.output.tables import Rows

_WIDE = 180
"""Width in columns if the output is not a terminal."""


def layout(rows: Rows, num_texts: int) -> rich.table.Table:
    """Returns a table, with numbers to the right.

    Args:
        rows: the rows.
        num_texts: number of columns that are texts; the others are numbers.
    """
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    heads, *others = rows
    for place, name in enumerate(heads):
        is_text = place < num_texts
        table.add_column(
            name,
            overflow="fold",
            justify="left" if is_text else "right",
            no_wrap=not is_text,
        )
    for row in others:
        table.add_row(*map(rich.text.Text, row))
    return table


def as_text(shown: rich.console.RenderableType, width: int | None = None) -> str:
    """Formats a table as text.

    Args:
        shown: the table, or what else rich shows.
        width: number of columns; None for those of the terminal.
    """
    if width is None and not sys.stdout.isatty():
        width = _WIDE
    console = rich.console.Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(shown)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def as_html(title: str, *several: Rows) -> str:
    """Formats tables as HTML for notebooks."""
    return f"<p>{title}</p>" + "".join(map(tables.as_html, several))


def finite(data: Any) -> Any:
    """Returns plain data with None for numbers that are not finite, for JSON."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
