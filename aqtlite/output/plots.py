"""Plots, by Matplotlib."""

import importlib.util
import io
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from aqtlite.output import files


def check_path(path: str | os.PathLike[str]) -> None:
    """Checks that a plot can be drawn into a file.

    Args:
        path: name of the file.

    Raises:
        ModuleNotFoundError: if Matplotlib is not installed.
        ValueError: if it does not write files with that ending.
    """
    known = _figure(1).canvas.get_supported_filetypes()
    suffix = pathlib.Path(path).suffix.removeprefix(".")
    if suffix not in known:
        raise ValueError(
            f"{str(path)!r} is no name of a plot: it ends in one of "
            f"{', '.join(sorted(known))}"
        )


def _figure(height: float) -> Any:
    """Returns a new figure, 8 inches wide.

    Raises:
        ModuleNotFoundError: if Matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "plots are drawn by Matplotlib, which the extra demo installs: pip install "
            "'aqtlite[demo]'",
            name="matplotlib",
        )
    from matplotlib.figure import Figure

    return Figure(figsize=(8, height), layout="constrained")


def _save(figure: Any, path: str | os.PathLike[str]) -> None:
    """Writes a figure into a file of the format that its name ends in.

    Raises:
        UnwritableError: if the file cannot be written.
        ValueError: if Matplotlib writes no files with that ending, or `path` is an
            address, a folder or a symbolic link.
    """
    files.check_target(path)
    drawn = io.BytesIO()
    suffix = pathlib.Path(path).suffix.removeprefix(".")
    figure.savefig(drawn, format=suffix or None, dpi=120)
    files.write(drawn.getvalue(), path)


def bars(
    values: Mapping[str, Mapping[str, float]],
    label: str,
    path: str | os.PathLike[str],
) -> None:
    """Draws groups of horizontal bars into a file.

    Args:
        values: for each color, the values by the name of the group.
        label: label of the values.
        path: name of the file.
    """
    groups = list(dict.fromkeys(name for one in values.values() for name in one))
    figure = _figure(1.2 + len(groups) * (0.1 + 0.14 * len(values)))
    axes = figure.subplots()
    thickness = 0.8 / len(values)
    for number, (name, by_group) in enumerate(values.items()):
        places = [groups.index(group) + number * thickness for group in by_group]
        finite = [x if math.isfinite(x) else 0.0 for x in by_group.values()]
        axes.barh(places, finite, thickness, label=name)
    axes.axvline(0.0, color="black", linewidth=1)
    middle = 0.4 - thickness / 2
    axes.set_yticks([i + middle for i in range(len(groups))], groups, fontsize=7)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel(label)
    axes.legend()
    _save(figure, path)


def curve(
    points: Sequence[tuple[float, float]],
    others: Mapping[str, tuple[float, float]],
    chosen: tuple[float, float],
    in_float: float,
    labels: tuple[str, str],
    path: str | os.PathLike[str],
) -> None:
    """Draws a curve beside points with names into a file.

    Args:
        points: points of the curve, such as bytes and loss.
        others: the other points, by name.
        chosen: the point to mark.
        in_float: value in float, a line across.
        labels: labels of both axes.
        path: name of the file.
    """
    figure = _figure(4.5)
    axes = figure.subplots()
    axes.plot(*zip(*points, strict=True), "o-", color="C0", label="chosen")
    axes.plot(*chosen, "o", color="C0", markersize=11, fillstyle="none")
    for name, place in others.items():
        axes.plot(*place, "s", color="C1")
        axes.annotate(
            name, place, xytext=(5, 5), textcoords="offset points", fontsize=8
        )
    axes.plot([], [], "s", color="C1", label="uniform")
    if math.isfinite(in_float):
        axes.axhline(in_float, color="black", linewidth=1, label="float")
    axes.grid(alpha=0.3)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.legend()
    _save(figure, path)


def scatter(
    points: Mapping[str, tuple[float, float]],
    labels: tuple[str, str],
    smallest: float,
    path: str | os.PathLike[str],
) -> None:
    """Draws points with names into a file, the vertical axis logarithmic.

    Args:
        points: the points, by name.
        labels: labels of both axes.
        smallest: value up to which the vertical axis is linear, on both sides of 0.
        path: name of the file.
    """
    figure = _figure(6)
    axes = figure.subplots()
    axes.set_yscale("symlog", linthresh=smallest)
    axes.margins(x=0.15)
    for number, (name, place) in enumerate(points.items()):
        axes.plot(*place, "o", color=f"C{number % 10}")
        axes.annotate(
            name, place, xytext=(4, 4), textcoords="offset points", fontsize=7
        )
    axes.grid(alpha=0.3)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    _save(figure, path)


def lines(
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    label: str,
    path: str | os.PathLike[str],
) -> None:
    """Draws panels of lines, one above another, into a file.

    Args:
        panels: for each label of a vertical axis, the lines by name: their places on
            the horizontal axis, and their values.
        label: label of the horizontal axis.
        path: name of the file.
    """
    figure = _figure(3.2 * len(panels))
    several = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axes, (name, values) in zip(several, panels.items(), strict=True):
        for line, (places, heights) in values.items():
            axes.plot(places, heights, ".-", label=line, linewidth=1)
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
    several[-1].set_xlabel(label)
    several[0].legend(fontsize=6, ncols=2)
    _save(figure, path)
