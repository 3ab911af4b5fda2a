"""Quantize networks that others trained, and measure what it costs.

    python -m benchmarks.pretrained [--networks NAME ...] [--contestants NAME ...]
                                    [--quick] [--out FOLDER] [--page FILE.md]

Finished measurements are kept in a folder, a file of JSON for each network: an
interrupted command resumes. Needs the `pretrained` extra; figures.md beside this file
explains the figures, and which packages need `pip install --no-deps`.
"""

import argparse
import functools
import pathlib
import re
from collections.abc import Callable, Sequence

from rich.console import Console

from benchmarks.harness import pages, progress, tables
from benchmarks.pretrained import (
    contestants,
    edge_files,
    networks,
    records,
    report,
    routes,
)
from benchmarks.pretrained.networks import Network
from benchmarks.pretrained.records import Record
from benchmarks.pretrained.tasks.task import Task

QUICK_NETWORKS = ("files", "voice")

QUICK_CONTESTANTS = "float32.*|int8|weights of 8 bits|.*float32|.*dynamic.*"

Tell = Callable[[str], None]

ROUNDS = 3
"""Rounds of the comparison of times."""


def parser(available: Sequence[str]) -> argparse.ArgumentParser:
    """Parser of the command line, with the names of networks."""
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.pretrained", description=__doc__.splitlines()[0]
    )
    result.add_argument(
        "--networks",
        nargs="+",
        metavar="NAME",
        choices=available,
        help=f"of {', '.join(available)} (default: all)",
    )
    result.add_argument(
        "--contestants",
        metavar="REGEX",
        help="those with a name that this regular expression matches (default: all)",
    )
    result.add_argument(
        "--again", action="store_true", help="measure them again, known or not"
    )
    result.add_argument(
        "--quick",
        action="store_true",
        help=f"a few items, and contestants; of {' and '.join(QUICK_NETWORKS)}, unless "
        "others are given",
    )
    result.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="FOLDER",
        help="the folder of finished measurements (default: pretrained, or "
        "pretrained-quick)",
    )
    result.add_argument(
        "--report", action="store_true", help="measure nothing, report what FOLDER has"
    )
    result.add_argument(
        "--blame",
        action="store_true",
        help="print what each contraction alone in int8 does to the output, and stop",
    )
    result.add_argument(
        "--page",
        type=pathlib.Path,
        metavar="FILE.md",
        help="write tables between the markers of a page, as of figures.md beside this",
    )
    return result


def main(
    arguments: Sequence[str] | None = None,
    available: Sequence[Network] = networks.NETWORKS,
) -> None:
    """Measure what is missing, print the tables, and write the page."""
    by_name = {one.name: one for one in available}
    command = parser(tuple(by_name))
    asked = command.parse_args(arguments)
    quick_or_all = QUICK_NETWORKS if asked.quick else by_name
    names = list(dict.fromkeys(asked.networks or quick_or_all))
    out = asked.out or pathlib.Path("pretrained-quick" if asked.quick else "pretrained")
    pattern = asked.contestants or (QUICK_CONTESTANTS if asked.quick else ".*")
    chosen = [n for n in contestants.NAMES if re.fullmatch(pattern, n)]
    if not chosen:
        command.error(f"no contestant is like {pattern!r}")
    console = tables.console()
    found: dict[str, list[Record]] = {}
    try:
        with progress.shown(console, names) as tell:
            for name in names:
                tell(name, "data")
                network = by_name[name]
                path = network.path()
                task = network.task(path, asked.quick)
                if asked.blame:
                    _print_blame(console, network, task)
                    continue
                file = out / f"{name}.json"
                run = _Run(network, task, file)
                if not asked.report:
                    run.measure(chosen, asked.again, functools.partial(tell, name))
                found[name] = run.records()
        for name, measured in found.items():
            title = f"{name}: {by_name[name].what}, in percent"
            console.print(
                report.table(title, measured, markdown=not console.is_terminal)
            )
        if asked.page:
            texts = {name: report.page_table(one) for name, one in found.items()}
            pages.write(asked.page, texts)
    except (
        networks.NotInstalledError,
        records.RecordsError,
        pages.PageError,
    ) as error:
        command.error(str(error))


class _Run:
    """The measurements of one network."""

    def __init__(self, network: Network, task: Task, file: pathlib.Path):
        self._network, self._task = network, task
        self._file = file
        self._hashes = {}
        for name in contestants.NAMES:
            settings = routes.identity(name) if name in routes.NAMES else ""
            self._hashes[name] = records.identity(
                task, network.path(), f"{name}\n{settings}"
            )

    def measure(self, names: Sequence[str], again: bool, tell: Tell) -> None:
        """Measures what is missing, and writes each result at once."""
        known = records.read(self._file)
        missing = [n for n in names if again or self._hashes[n] not in known]
        if not missing:
            return
        tell("float32 beside onnxruntime")
        contest = contestants.Contest(self._network, self._task, ROUNDS)
        tell(f"float32 differs from onnxruntime by {contest.difference:.1e}")
        for name in missing:
            tell(name)
            try:
                one = Record(name, self._hashes[name], contest.figures(name))
            except contestants.Refused as error:
                one = Record(name, self._hashes[name], None, str(error))
            except edge_files.NoQuantizerError as error:
                tell(f"{name} was left out: {error}")
                continue
            known[one.hash] = one
            records.write(self._file, known)

    def records(self) -> list[Record]:
        """What is known, in the order of contestants."""
        known = records.read(self._file)
        return [known[one] for one in self._hashes.values() if one in known]


def _print_blame(console: Console, network: Network, task: Task) -> None:
    contest = contestants.Contest(network, task, rounds=1)
    for contraction, decibels in contest.blame():
        console.print(f"{decibels:6.1f} dB  {contraction}", soft_wrap=True)


if __name__ == "__main__":
    main()
