"""Progress of a conversion: a bar in a terminal, plain lines elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator

import rich.console
import rich.progress
from rich import filesize

OnBytes = Callable[[int, str], None]
"""Callback that takes a number of bytes read, and the name of their array."""

_LINES = 10


@contextlib.contextmanager
def byte_progress(
    console: rich.console.Console | None, total: int
) -> Iterator[OnBytes]:
    """Shows bytes, rate and time left; yields a callback to call for each array."""
    if console is None:
        yield lambda count, what: None
        return
    if not console.is_terminal:
        yield _plain_lines(console, total)
        return
    with rich.progress.Progress(
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
        rich.progress.TextColumn("{task.description}"),
        console=console,
    ) as progress:
        task = progress.add_task("", total=total)
        yield lambda count, what: progress.update(task, advance=count, description=what)


def _plain_lines(console: rich.console.Console, total: int) -> OnBytes:
    start = time.perf_counter()
    done = 0
    shown = 0

    def on_bytes(count: int, what: str) -> None:
        nonlocal done, shown
        done += count
        if done * _LINES // max(total, 1) > shown:
            shown = done * _LINES // max(total, 1)
            rate = done / max(time.perf_counter() - start, 1e-9)
            left = (total - done) / max(rate, 1e-9)
            console.print(
                f"{filesize.decimal(done)} of {filesize.decimal(total)}, "
                f"{filesize.decimal(int(rate))}/s, "
                f"{left:.0f} s left: {what}",
                soft_wrap=True,
                highlight=False,
            )

    return on_bytes
