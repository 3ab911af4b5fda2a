"""How far a long comparison is: a bar on a terminal, plain lines elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator

import rich.console
import rich.progress

OnDone = Callable[[str], None]
"""Counts one more as done, and says how it stands."""

_LINES = 20


@contextlib.contextmanager
def shown(console: rich.console.Console, total: int) -> Iterator[OnDone]:
    """Shows the progress of `total` comparisons."""
    if not console.is_terminal:
        yield _plain_lines(console, total)
        return
    with rich.progress.Progress(
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeRemainingColumn(),
        rich.progress.TextColumn("{task.description}"),
        console=console,
    ) as progress:
        task = progress.add_task("", total=total)
        yield lambda status: progress.update(task, advance=1, description=status)


def _plain_lines(console: rich.console.Console, total: int) -> OnDone:
    start = time.perf_counter()
    done = 0

    def on_done(status: str) -> None:
        nonlocal done
        done += 1
        if done * _LINES // total > (done - 1) * _LINES // total:
            seconds = time.perf_counter() - start
            left = seconds / done * (total - done)
            times = f"{seconds:.0f} s, about {left:.0f} s left"
            console.print(
                f"{done} of {total}, {times}: {status}",
                soft_wrap=True,
                highlight=False,
            )

    return on_done
