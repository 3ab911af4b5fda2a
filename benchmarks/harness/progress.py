"""Progress of the suite: a bar on a terminal, plain lines elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator

import rich.console
import rich.progress

Report = Callable[[str, str], None]
"""Function called as ``report(workload, measurement)``."""


@contextlib.contextmanager
def shown(console: rich.console.Console, workloads: list[str]) -> Iterator[Report]:
    """Yield a `Report` to call before each measurement."""
    if not console.is_terminal:
        yield _plain_lines(console)
        return
    with rich.progress.Progress(
        rich.progress.SpinnerColumn(),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.description}"),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task("", total=len(workloads))
        yield lambda workload, what: bar.update(
            task,
            completed=workloads.index(workload),
            description=f"{workload}: {what}",
        )


def _plain_lines(console: rich.console.Console) -> Report:
    start = time.perf_counter()

    def report(workload: str, what: str) -> None:
        seconds = time.perf_counter() - start
        console.print(f"{seconds:4.0f} s  {workload}: {what}", soft_wrap=True)

    return report
