"""Plot the differences to float32 in the table of a page.

    python -m benchmarks.quality.plot PAGE.md PICTURE.png [--layers N] [--width N]

The plot carries a digest of the figures, which shows whether it matches the page.
`python -m benchmarks.quality --plot` draws the same plot.
"""

import argparse
import dataclasses
import hashlib
import math
import pathlib
from collections.abc import Mapping, Sequence

from benchmarks.harness import arguments as arguments_lib
from benchmarks.harness import pages
from benchmarks.quality import report
from benchmarks.quality.presets import FLOAT32
from benchmarks.quality.summary import Spread, Summary
from benchmarks.quality.training import Options

DIGEST = "Figures"
"""Name of the digest in the plot's metadata."""


def of_summaries(summaries: Sequence[Summary]) -> dict[str, Spread]:
    """The differences to float32 by preset, rounded to the digits of a page."""
    return {
        one.preset: _rounded(one.difference)
        for one in summaries
        if one.difference is not None and one.preset != FLOAT32
    }


def of_page(path: pathlib.Path, options: Options) -> dict[str, Spread]:
    """The differences to float32 by preset, from the table of a page.

    Raises:
        pages.PageError: if the page has no table for these options.
    """
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in report.read_page(path, options).splitlines()
        if line.startswith("|")
    ]
    place = report.COLUMNS.index(report.DIFFERENCE)
    found = {}
    # Skip the header and the rule.
    for cells in rows[2:]:
        if cells[place]:
            mean, _, error = cells[place].partition(" ± ")
            lowest, _, highest = cells[place + 1].partition(" to ")
            numbers = map(float, (mean, error or math.nan, lowest, highest))
            found[cells[0]] = Spread(*numbers)
    return found


def _rounded(spread: Spread) -> Spread:
    return Spread(*(round(x, 4) for x in dataclasses.astuple(spread)))


def digest(differences: Mapping[str, Spread]) -> str:
    """A digest of all figures."""
    lines = (f"{name} {spread}\n" for name, spread in differences.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def draw(differences: Mapping[str, Spread], path: pathlib.Path) -> None:
    """Draw each preset's range over seeds, the mean and the standard error."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(8, 1.2 + 0.35 * len(differences)), layout="constrained")
    axes = picture.subplots()
    for row, (name, spread) in enumerate(differences.items()):
        color = "C1" if name.startswith(("aqtp", "qwix")) else "C0"
        width = spread.highest - spread.lowest
        axes.barh(row, width, 0.5, spread.lowest, color=color, alpha=0.3)
        axes.errorbar(
            spread.mean,
            row,
            xerr=spread.standard_error,
            fmt="|",
            color=color,
            markersize=14,
            capsize=3,
        )
    axes.axvline(0.0, color="black", linewidth=1)
    axes.set_yticks(range(len(differences)), list(differences))
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel(
        "validation loss less float32's of the same seed, nats per byte\n"
        "bands: all seeds; bars: mean and its standard error"
    )
    picture.savefig(path, dpi=120, metadata={DIGEST: digest(differences)})


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the plot for a page."""
    defaults = Options()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality.plot",
        description=__doc__.splitlines()[0],
    )
    parser.add_argument("page", type=pathlib.Path, metavar="PAGE.md")
    parser.add_argument("picture", type=pathlib.Path, metavar="PICTURE.png")
    for name in ("layers", "width"):
        default = getattr(defaults, name)
        parser.add_argument(
            f"--{name}",
            type=arguments_lib.positive,
            metavar="N",
            default=default,
            help=f"which table of the page (default: {default})",
        )
    asked = parser.parse_args(arguments)
    options = dataclasses.replace(defaults, layers=asked.layers, width=asked.width)
    try:
        draw(of_page(asked.page, options), asked.picture)
    except pages.PageError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
