"""Tables, as text in terminals and HTML in notebooks."""

import html
from collections.abc import Sequence

Rows = Sequence[Sequence[str]]
"""Rows of cells; the first is the header."""


class Tables(str):
    """Tables as text, which notebooks show as HTML.

    >>> Tables([[("path", "grid"), ("fwd.lhs", "int8")]])
    path     grid
    fwd.lhs  int8
    """

    def __new__(cls, tables: Sequence[Rows]) -> "Tables":
        """Lays out tables, each a sequence of rows that begins with the header."""
        made = super().__new__(cls, "\n\n".join(map(_text, tables)))
        made._tables = tables
        return made

    _tables: Sequence[Rows]

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return "\n".join(map(as_html, self._tables))


def as_html(rows: Rows) -> str:
    """Formats a table as HTML.

    >>> as_html([("grid",), ("<int8>",)])
    '<table><tr><th>grid</th></tr><tr><td>&lt;int8&gt;</td></tr></table>'

    Args:
        rows: rows of cells; the first is the header.
    """
    tags = ["th", *["td"] * (len(rows) - 1)]
    lines = [
        "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
        for tag, row in zip(tags, rows, strict=True)
    ]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _text(rows: Rows) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    )
