"""Progress: bars and spinners on a terminal, plain lines elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import rich.console
import rich.progress

from aqtlite_demo import training

PLAIN_LINES = 10
"""Number of lines of training progress without a terminal."""

OnStep = Callable[[int, Mapping[str, training.Trained]], None]


def say(console: rich.console.Console, line: str, style: str | None = None) -> None:
    """Print a line verbatim, without wrapping it at the console's width."""
    console.print(line, style=style, soft_wrap=True)


@contextlib.contextmanager
def working(console: rich.console.Console, what: str) -> Iterator[None]:
    """Show a spinner with `what`, or print `what` if there is no terminal."""
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        say(console, what)
        yield


@contextlib.contextmanager
def training_progress(
    console: rich.console.Console, steps: int, names: Sequence[str]
) -> Iterator[OnStep]:
    """Show the progress of training; yield the `OnStep` to call after each step.

    Until the first step is done, a line says that the steps are being compiled.

    Args:
        console: console to print to.
        steps: number of steps.
        names: names of the models.
    """
    compiling = f"compiling the training steps of {' and '.join(names)}"
    if not console.is_terminal:
        say(console, f"{compiling}; then the models take turns")
        yield _plain_lines(console, steps)
        return
    progress = rich.progress.Progress(
        rich.progress.TextColumn("training"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TextColumn("{task.fields[losses]}"),
        rich.progress.TimeRemainingColumn(),
        console=console,
    )
    task = progress.add_task("training", total=steps, losses="")
    with contextlib.ExitStack() as stack:
        status = stack.enter_context(console.status(compiling))

        def on_step(step: int, runs: Mapping[str, training.Trained]) -> None:
            progress.update(task, completed=step, losses=_losses(runs))
            if not progress.live.is_started:
                status.stop()
                stack.enter_context(progress)

        yield on_step


def _plain_lines(console: rich.console.Console, steps: int) -> OnStep:
    marks = {round(steps * i / PLAIN_LINES) for i in range(1, PLAIN_LINES + 1)}
    start = time.perf_counter()

    def on_step(step: int, runs: Mapping[str, training.Trained]) -> None:
        if step in marks:
            seconds = time.perf_counter() - start
            say(console, f"step {step} of {steps}: {_losses(runs)} ({seconds:.0f} s)")

    return on_step


def _losses(runs: Mapping[str, training.Trained]) -> str:
    losses = ", ".join(f"{name} {run.losses[-1]:.3f}" for name, run in runs.items())
    return f"loss {losses}"
