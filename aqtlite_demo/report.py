"""Report of the demo: table, loss curves, samples, and figures as JSON."""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import rich.box
import rich.panel
import rich.table
import rich.text
from rich import filesize

from aqtlite_demo import training
from aqtlite_demo.serving import Served


@dataclasses.dataclass(frozen=True)
class Figures:
    """The figures of one model."""

    validation_loss: float
    step_seconds: float
    checkpoint_bytes: int
    bit_exact: bool
    largest_difference: float
    seconds_per_token: float


def figures(
    trained: training.Trained, checkpoint_bytes: int, served: Served
) -> Figures:
    """Collect the figures of one model."""
    return Figures(
        validation_loss=trained.validation_loss,
        step_seconds=trained.step_seconds,
        checkpoint_bytes=checkpoint_bytes,
        bit_exact=served.bit_exact,
        largest_difference=served.largest_difference,
        seconds_per_token=served.seconds_per_token,
    )


def table(found: Mapping[str, Figures]) -> rich.table.Table:
    """Table with a column for each of two models, and a column comparing them."""
    (base_name, base), (name, other) = found.items()

    def ratio(field: str) -> str:
        divisor = getattr(base, field)
        return f"{getattr(other, field) / divisor:.2f}x" if divisor else ""

    rows = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    rows.add_column("")
    for column in (base_name, name, f"{name} / {base_name}"):
        rows.add_column(column, justify="right", no_wrap=True)
    rows.add_row(
        "validation loss, nats per token",
        f"{base.validation_loss:.4f}",
        f"{other.validation_loss:.4f}",
        f"{other.validation_loss - base.validation_loss:+.4f}",
    )
    rows.add_row(
        "median training step",
        _milliseconds(base.step_seconds),
        _milliseconds(other.step_seconds),
        ratio("step_seconds"),
    )
    rows.add_row(
        "serving checkpoint on disk",
        filesize.decimal(base.checkpoint_bytes),
        filesize.decimal(other.checkpoint_bytes),
        ratio("checkpoint_bytes"),
    )
    rows.add_row(
        "served equals trained, bit for bit",
        "yes" if base.bit_exact else "NO",
        "yes" if other.bit_exact else "NO",
        "",
    )
    rows.add_row(
        "time per generated token",
        _milliseconds(base.seconds_per_token),
        _milliseconds(other.seconds_per_token),
        ratio("seconds_per_token"),
    )
    return rows


def sample(title: str, text: str) -> rich.panel.Panel:
    """A text in a box."""
    return rich.panel.Panel(rich.text.Text(text), title=title, title_align="left")


def failures(found: Mapping[str, Figures]) -> list[str]:
    """Messages about diverged training and inexact serving, one line each."""
    lines = []
    for name, figure in found.items():
        if not math.isfinite(figure.validation_loss):
            lines.append(f"{name}: training diverged; try a smaller --lr")
        if not figure.bit_exact:
            lines.append(
                f"{name}: what is served is NOT what was trained: the logits differ by "
                f"up to {figure.largest_difference:.3g}"
            )
    return lines


def conclusion(found: Mapping[str, Figures]) -> str:
    """One-sentence summary of the figures."""
    (base_name, base), (name, other) = found.items()
    loss = other.validation_loss - base.validation_loss
    size = other.checkpoint_bytes / base.checkpoint_bytes
    step = other.step_seconds / base.step_seconds
    token = other.seconds_per_token / base.seconds_per_token
    return (
        f"{name} ended {abs(loss):.4f} nats per token "
        f"{'above' if loss > 0 else 'below'} {base_name}, trained in {step:.2f} of its "
        f"time, is served in {size:.2f} of its size and {token:.2f} of its time for a "
        "token, and serves what was trained, bit for bit."
    )


def as_dict(options: Mapping, found: Mapping[str, Figures]) -> dict[str, Any]:
    """The options and the figures, unrounded, as plain data."""
    models = {name: dataclasses.asdict(figure) for name, figure in found.items()}
    return {"options": dict(options), "models": models}


def plot(
    path: pathlib.Path,
    runs: Mapping[str, training.Trained],
    found: Mapping[str, Figures],
) -> bool:
    """Draw the losses by step, their differences, and times and sizes.

    Args:
        path: file to write.
        runs: two runs on the same batches, the baseline first.
        found: figures of both runs.

    Returns:
        True, or False if matplotlib is not installed.
    """
    try:
        from matplotlib import figure as figure_lib
    except ModuleNotFoundError:
        return False
    figure = figure_lib.Figure(figsize=(10, 6), layout="constrained")
    halves: Any = figure.subfigures(1, 2, width_ratios=(7, 3))
    curves, bars = halves
    losses, differences = curves.subplots(2, sharex=True, height_ratios=(2, 1))
    _plot_losses(losses, differences, runs)
    _plot_bars(bars.subplots(3), found)
    figure.savefig(path, dpi=150)
    return True


def _plot_losses(
    losses: Any, differences: Any, runs: Mapping[str, training.Trained]
) -> None:
    # Larger markers below smaller ones, since the two curves nearly coincide.
    styles = (("-", 9), ("--", 5))
    for (name, run), (style, size) in zip(runs.items(), styles, strict=True):
        steps = range(1, len(run.losses) + 1)
        (line,) = losses.plot(
            steps, run.losses, style, alpha=0.5, label=f"{name}, train"
        )
        losses.plot(
            *zip(*run.curve, strict=True),
            style,
            marker="o",
            markersize=size,
            color=line.get_color(),
            label=f"{name}, validation",
        )
    (base_name, base), (name, other) = runs.items()
    training_difference = np.subtract(other.losses, base.losses)
    differences.plot(steps, training_difference, color="C1", alpha=0.5, label="train")
    curve_steps, base_curve = zip(*base.curve, strict=True)
    _, other_curve = zip(*other.curve, strict=True)
    differences.plot(
        curve_steps,
        np.subtract(other_curve, base_curve),
        marker="o",
        color="C1",
        label="validation",
    )
    differences.axhline(0.0, color="black", linewidth=1)
    losses.set(ylabel="loss, nats per token")
    differences.set(xlabel="step", ylabel=f"{name} - {base_name}")
    for axes in (losses, differences):
        axes.grid(alpha=0.3)
        axes.legend()


def _plot_bars(panels: Any, found: Mapping[str, Figures]) -> None:
    titles: dict[str, tuple[str, Callable[[Any], str]]] = {
        "median training step": ("step_seconds", _milliseconds),
        "time per generated token": ("seconds_per_token", _milliseconds),
        "serving checkpoint on disk": ("checkpoint_bytes", filesize.decimal),
    }
    for axes, (title, (field, text)) in zip(panels, titles.items(), strict=True):
        values = [getattr(figure, field) for figure in found.values()]
        shown = axes.barh(list(found), values, color=("C0", "C1"))
        axes.bar_label(shown, [text(value) for value in values], padding=3)
        axes.set_title(title, fontsize="medium")
        axes.set_xlim(0, 1.5 * max(values))
        axes.xaxis.set_visible(False)
        axes.invert_yaxis()
        axes.spines[["top", "right", "bottom"]].set_visible(False)


def _milliseconds(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:.{0 if milliseconds >= 100 else 2}f} ms"
