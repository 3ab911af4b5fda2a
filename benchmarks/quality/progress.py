"""Progress of the runs: a bar on a terminal, plain lines elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator

import rich.console
import rich.progress

OnStep = Callable[[int, float], None]
Begin = Callable[[str], OnStep]
"""Function called before each run with a description; returns an `OnStep`."""

PLAIN_LINES = 4
"""Number of lines per run without a terminal."""


@contextlib.contextmanager
def shown(console: rich.console.Console, runs: int, steps: int) -> Iterator[Begin]:
    """Yield a `Begin`.

    Args:
        console: console to print to.
        runs: number of runs.
        steps: number of steps per run.
    """
    if not console.is_terminal:
        yield lambda what: _plain_lines(console, what, steps)
        return
    with rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeRemainingColumn(),
        rich.progress.TextColumn("{task.fields[loss]}"),
        console=console,
    ) as bar:
        every = bar.add_task("all runs", total=runs * steps, loss="")
        single = bar.add_task("", total=steps, loss="")
        begun = 0

        def begin(what: str) -> OnStep:
            nonlocal begun
            done = begun * steps
            begun += 1
            bar.reset(single, description=what, loss="compiling")

            def on_step(step: int, loss: float) -> None:
                bar.update(single, completed=step, loss=f"loss {loss:.3f}")
                bar.update(every, completed=done + step)

            return on_step

        yield begin


def _plain_lines(console: rich.console.Console, what: str, steps: int) -> OnStep:
    marks = {round(steps * i / PLAIN_LINES) for i in range(1, PLAIN_LINES + 1)}
    start = time.perf_counter()

    def on_step(step: int, loss: float) -> None:
        if step in marks:
            seconds = time.perf_counter() - start
            console.print(
                f"{what}: step {step} of {steps}, loss {loss:.3f} ({seconds:.0f} s)",
                soft_wrap=True,
            )

    return on_step
