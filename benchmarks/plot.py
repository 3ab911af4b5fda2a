"""The speed-up of aqtlite over float32 against size, as a picture."""

import pathlib
from collections.abc import Sequence

from benchmarks.contestants import AQTLITE
from benchmarks.figures import Figure

WORKLOADS = ("mlp", "serving")
"""What the picture shows: one of them has to be measured."""


class PlotError(Exception):
    """Why there is no picture."""


def check(workloads: Sequence[str]) -> None:
    """Finds out before a long run whether its picture can be drawn.

    Raises:
        PlotError: if matplotlib is missing, or nothing is measured that it shows.
    """
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise PlotError(
            "--plot needs matplotlib: pip install matplotlib, or the `test` extra"
        ) from error
    if not set(WORKLOADS) & set(workloads):
        raise PlotError(f"--plot shows {' and '.join(WORKLOADS)}: measure one of them")


def draw(figures: Sequence[Figure], path: pathlib.Path) -> None:
    """Writes the picture.

    One panel against the MLP's width, one against the rows that are served, each with
    a line at 1.0, above which aqtlite is faster than float32.
    """
    from matplotlib.figure import Figure as Picture

    ours = [figure for figure in figures if figure.contestant == AQTLITE]
    mlp: dict[str, list[tuple[int, float]]] = {}
    rows: dict[str, list[tuple[int, float]]] = {}
    for figure in ours:
        if not figure.relative:
            continue
        case, speedup = figure.case, 1 / figure.relative
        if figure.workload == "mlp":
            label = f"{case['phase']}, {case['input']}"
            mlp.setdefault(label, []).append((case["width"], speedup))
        elif figure.workload == "serving" and case["program"].startswith("layer"):
            rows.setdefault(case["program"], []).append((case["rows"], speedup))
    titles = ("MLP block, width d", "Serving frozen weights, rows")
    panels = [
        (title, curves)
        for title, curves in zip(titles, (mlp, rows), strict=True)
        if curves
    ]

    picture = Picture(figsize=(5 * len(panels), 4), layout="constrained")
    for axes, (title, curves) in zip(
        picture.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        for label, points in curves.items():
            style = "--" if label.endswith("3-D") else "-"
            axes.plot(*zip(*points, strict=True), style, marker="o", label=label)
        axes.axhline(1.0, color="black", linewidth=1)
        axes.set_xscale("log", base=2)
        ticks = [x for x, _ in next(iter(curves.values()))]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_ylim(bottom=0)
        axes.set_title(title)
        axes.set_ylabel("speed-up over float32")
        axes.legend()
    picture.savefig(path, dpi=120)
