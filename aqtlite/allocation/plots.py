"""Plots, by Matplotlib."""

import importlib.util
import math
import os
from collections.abc import Mapping
from typing import Any


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
    figure.savefig(path, dpi=120)
