"""Plots of taps, of one call or over time."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from aqtlite import errors
from aqtlite.output import plots
from aqtlite.taps import records
from aqtlite.taps.records import TappedOperand, Taps


def plot_taps(taps: Taps | Mapping[int, Taps], path: str | os.PathLike[str]) -> None:
    """Plots taps to a file.

    Of one call, a bar for each operand with its signal-to-noise ratio. Of several
    steps, three panels over the steps: the signal-to-noise ratio, the largest
    magnitude, and how much of the range is used. Of scanned layers, the worst counts.

    Args:
        taps: the taps, or those of several steps, by step.
        path: name of the file, which ends in ".png", ".svg" or ".pdf".

    Raises:
        ModuleNotFoundError: if Matplotlib is not installed.
        TypeError: if `taps` is neither.
        ValueError: if Matplotlib writes no files with that ending, or there are no
            steps.
    """
    is_history = isinstance(taps, Mapping)
    if not is_history and not isinstance(taps, Taps):
        raise TypeError(
            "plot_taps takes the taps of aqtlite.tap, or those of several steps as "
            f"{{step: taps}}, got {type(taps).__name__}"
        )
    if not taps:
        raise ValueError("plot_taps was given the taps of no step")
    plots.check_path(path)
    if isinstance(taps, Taps):
        bars: dict[str, dict[str, float]] = {}
        for one in taps.operands:
            bars.setdefault(one.operand, {})[errors.label(one.path)] = _finite(
                records.lowest(one.snr)
            )
        plots.bars(bars, "signal-to-noise ratio of rounding, dB", path)
        return
    panels = {
        "dB": _over_time(taps, lambda one: records.lowest(one.snr)),
        "log10 of the largest": _over_time(taps, _log_of_largest),
        "largest by reach": _over_time(
            taps, lambda one: np.fmax.reduce(np.ravel(one.reach))
        ),
    }
    plots.lines(panels, "step", path)


def _log_of_largest(one: TappedOperand) -> float:
    return float(np.log10(max(np.fmax.reduce(np.ravel(one.largest)), 1e-38)))


def _finite(x: Any) -> float:
    return float(x) if np.isfinite(x) else float("nan")


def _over_time(
    history: Mapping[int, Taps], value: Any
) -> dict[str, tuple[list[float], list[float]]]:
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for step, taps in sorted(history.items()):
        for one in taps.operands:
            places, heights = lines.setdefault(
                f"{errors.label(one.path)} {one.operand}", ([], [])
            )
            places.append(step)
            heights.append(_finite(value(one)))
    return lines
