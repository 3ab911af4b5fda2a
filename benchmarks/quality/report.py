"""The table of all presets, on the terminal and on a page."""

import math
import pathlib
import textwrap
from collections.abc import Sequence

import rich.box
from rich.table import Table

from benchmarks.harness import pages
from benchmarks.quality.presets import FLOAT32
from benchmarks.quality.summary import Spread, Summary
from benchmarks.quality.training import VALIDATION_BATCH, Options

DIFFERENCE = "less float32's"

COLUMNS = (
    "",
    "seeds",
    "validation loss",
    "range",
    DIFFERENCE,
    "range",
    "validation's error",
)


def table(summaries: Sequence[Summary], *, markdown: bool) -> Table:
    """Table with a row for each preset.

    Args:
        summaries: summaries of the presets, in the order of the rows.
        markdown: use Markdown instead of lines.
    """
    drawn = Table(box=rich.box.MARKDOWN if markdown else rich.box.SIMPLE)
    for name in COLUMNS:
        drawn.add_column(name, justify="right" if name else "left", no_wrap=True)
    for one in summaries:
        drawn.add_row(*_cells(one))
    return drawn


def page_text(summaries: Sequence[Summary], options: Options, versions: str) -> str:
    """The table in Markdown, below a line that describes the runs."""
    rule = ["---", *["---:"] * (len(COLUMNS) - 1)]
    rows = [COLUMNS, rule, *map(_cells, summaries)]
    what = (
        f"{options.steps} steps of {options.batch} x {options.length} bytes at "
        f"learning rate {options.lr:g}; {options.layers} layers of width "
        f"{options.width}; {options.validation_batches * VALIDATION_BATCH} held-out "
        f"windows. {versions}."
    )
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*textwrap.wrap(what, 88), "", *lines])


def _cells(one: Summary) -> list[str]:
    cells = [one.preset, str(one.seeds), _mean(one.loss), _range(one.loss)]
    if one.difference is None or one.preset == FLOAT32:
        return [*cells, "", "", ""]
    return [
        *cells,
        _mean(one.difference, "+"),
        _range(one.difference, "+"),
        f"{one.validation_error:.4f}",
    ]


def _mean(spread: Spread, sign: str = "") -> str:
    text = f"{spread.mean:{sign}.4f}"
    if math.isnan(spread.standard_error):
        return text
    return f"{text} ± {spread.standard_error:.4f}"


def _range(spread: Spread, sign: str = "") -> str:
    return f"{spread.lowest:{sign}.4f} to {spread.highest:{sign}.4f}"


def markers(options: Options) -> tuple[str, str]:
    """The marker lines of a page, between which `write_page` puts the table."""
    return pages.markers(_name(options))


def write_page(path: pathlib.Path, options: Options, text: str) -> None:
    """Put the text between the markers of a page.

    Raises:
        PageError: if the page has no markers.
    """
    pages.write(path, {_name(options): text})


def read_page(path: pathlib.Path, options: Options) -> str:
    """The text between the markers of a page.

    Raises:
        PageError: if the page has no markers.
    """
    return pages.read(path, _name(options))


def _name(options: Options) -> str:
    return f"{options.layers} layers of width {options.width}"
