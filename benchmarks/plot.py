"""Plot the speed-up of aqtlite, AQT and Qwix over float32, from the suite's JSON.

    python -m benchmarks.plot FIGURES.json PICTURE.png

One panel each for the MLP block forward, the block forward + backward, and serving a
layer with frozen weights. The caption has the machine and the versions from the JSON.
"""

import argparse
import json
import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import phases
from benchmarks.harness.figures import Figure

WORKLOADS = ("mlp", "serving")
"""Workloads to plot."""

COLORS = {"aqtlite": "C0", "aqtp": "C1", "qwix, nearest": "C2"}
"""Contestants to plot, by their name in the JSON."""

INPUT_STYLES = {"2-D": "-", "3-D": "--"}

CAPTION_WIDTH = 60
"""Caption width in characters, per panel."""

Curves = dict[tuple[str, str], list[tuple[int, float]]]
"""Points ``(x, speed-up)`` by contestant and kind of input."""


class PlotError(Exception):
    """Nothing can be plotted; the message has the reason."""


def check(workloads: Sequence[str]) -> None:
    """Check before a long run that its figures can be plotted.

    Raises:
        PlotError: if matplotlib is missing, or no workload of `WORKLOADS` is measured.
    """
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise PlotError(
            "--plot needs matplotlib: pip install matplotlib, or the `test` extra"
        ) from error
    if not set(WORKLOADS) & set(workloads):
        raise PlotError(f"--plot shows {' and '.join(WORKLOADS)}: measure one of them")


def draw(
    figures: Sequence[Figure], machine: Mapping[str, Any], path: pathlib.Path
) -> None:
    """Write the picture.

    Args:
        figures: figures of any workloads, of which `WORKLOADS` are plotted.
        machine: see `benchmarks.harness.machine`.
        path: file to write, with a suffix that matplotlib knows.

    Raises:
        PlotError: if no figure is of `WORKLOADS`.
    """
    from matplotlib.figure import Figure as Picture
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter

    panels = _panels(figures)
    if not panels:
        raise PlotError(f"no figures of {' or '.join(WORKLOADS)} to plot")
    picture = Picture(figsize=(4.5 * len(panels), 4.4), layout="constrained")
    axes = picture.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    axes[0].set_ylabel("speed-up over float32 (higher is faster)")
    for panel, (title, x_label, curves) in zip(axes, panels, strict=True):
        for (contestant, kind), points in curves.items():
            panel.plot(
                *zip(*points, strict=True),
                INPUT_STYLES.get(kind, "-"),
                color=COLORS[contestant],
                marker="o",
            )
        panel.axhline(1.0, color="black", linewidth=1)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}x"))
        ticks = sorted({x for points in curves.values() for x, _ in points})
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.set(title=title, xlabel=x_label)
        panel.grid(alpha=0.3)
    handles = [
        *(Line2D([], [], color=c, marker="o", label=n) for n, c in COLORS.items()),
        *(
            Line2D([], [], color="gray", linestyle=style, label=f"{kind} input")
            for kind, style in INPUT_STYLES.items()
        ),
    ]
    picture.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    text = textwrap.fill(caption(machine), CAPTION_WIDTH * len(panels))
    picture.supxlabel(text, fontsize="small")
    picture.savefig(path, dpi=120)


def _panels(figures: Sequence[Figure]) -> list[tuple[str, str, Curves]]:
    """Title, x-axis label and curves of each panel with data."""
    blocks: dict[str, Curves] = {phase: {} for phase in phases.PHASES}
    layer: Curves = {}
    title = "Serving frozen weights"
    for figure in figures:
        if figure.contestant not in COLORS or not figure.relative:
            continue
        name, case, speedup = figure.contestant, figure.case, 1 / figure.relative
        if figure.workload == "mlp":
            curves = blocks[case["phase"]]
            points = curves.setdefault((name, case["input"]), [])
            points.append((case["width"], speedup))
        elif figure.workload == "serving" and case["program"].startswith("layer"):
            title = f"Serving frozen weights: {case['program']}"
            layer.setdefault((name, ""), []).append((case["rows"], speedup))
    panels = [
        (f"MLP block d, 4d, d: {phase}", "width d", curves)
        for phase, curves in blocks.items()
    ]
    panels.append((title, "rows of the input", layer))
    return [panel for panel in panels if panel[2]]


def caption(machine: Mapping[str, Any]) -> str:
    """Caption with the machine and the versions, in one line.

    >>> caption({"processor": "Xeon", "features": ["avx512_vnni"], "cores": 2,
    ...          "backend": "cpu", "device": "cpu", "versions": {"jax": "0.10.2"}})
    'Xeon (avx512_vnni), 2 cores. jax 0.10.2.'
    """
    hardware = machine["processor"]
    if machine["features"]:
        hardware += f" ({', '.join(machine['features'])})"
    hardware += f", {machine['cores']} cores"
    if machine["backend"] != "cpu":
        hardware = f"{machine['device']}, {hardware}"
    versions = ", ".join(f"{name} {v}" for name, v in machine["versions"].items())
    return f"{hardware}. {versions}."


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the JSON and write the picture."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plot", description=__doc__.splitlines()[0]
    )
    parser.add_argument("figures", metavar="FIGURES.json", type=pathlib.Path)
    parser.add_argument("picture", metavar="PICTURE.png", type=pathlib.Path)
    asked = parser.parse_args(arguments)
    document = json.loads(asked.figures.read_text())
    measured = [Figure(**figure) for figure in document["figures"]]
    try:
        check([figure.workload for figure in measured])
        draw(measured, document["machine"], asked.picture)
    except PlotError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
