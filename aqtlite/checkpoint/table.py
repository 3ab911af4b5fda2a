"""Tables of reports, as wide as the terminal."""

import itertools
from collections.abc import Sequence

import rich.box
import rich.console
import rich.table
import rich.text
from rich import filesize

from aqtlite.checkpoint.report import Report

_NARROWEST = 16
"""The least width of a path; with less, the table is wider than the terminal."""

_SHORTEST = 7
"""The least length to which one step is shortened."""


def table(report: Report, console: rich.console.Console) -> rich.console.Group:
    """Lays out a report: a row for each weight, and a summary.

    Paths lose the steps that all of them share, and are shortened in the middle where
    the console is too narrow for them.
    """
    rows = [
        (
            "x".join(map(str, row.shape)),
            row.grid,
            str(row.scales),
            filesize.decimal(row.bytes_before),
            filesize.decimal(row.bytes_after),
            "" if row.decibels is None else f"{row.decibels:.1f}",
        )
        for row in report.weights
    ]
    heads = ("stored", "grid", "scales", "before", "after", "dB")
    others = sum(
        max(len(cell) for cell in column) + 2
        for column in zip(heads, *rows, strict=True)
    )
    width = max(console.width - others, _NARROWEST)
    result = rich.table.Table(
        box=rich.box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    shared, paths = without_constant_steps([row.path for row in report.weights])
    result.add_column(shortened(f"weight in {shared}" if shared else "weight", width))
    for head in heads:
        result.add_column(head, no_wrap=True, justify="right")
    for path, row in zip(paths, rows, strict=True):
        result.add_row(shortened(path, width), *row)
    return rich.console.Group(result, "", rich.text.Text(summary(report)))


def summary(report: Report) -> str:
    """Summarizes a report in two lines."""
    ratio = report.bytes_after / max(report.bytes_before, 1)
    before, after = map(filesize.decimal, (report.bytes_before, report.bytes_after))
    sizes = f"{before} to {after}, {ratio:.2f} of the float size"
    if report.bytes_on_disk is not None:
        sizes += f" ({filesize.decimal(report.bytes_on_disk)} of files)"
    parts = [f"{len(report.weights)} frozen, {report.kept} kept"]
    known = [row.decibels for row in report.weights if row.decibels is not None]
    if known:
        mean = sum(known) / len(known)
        parts.append(f"SNR {min(known):.1f} dB worst, {mean:.1f} dB mean")
    if report.seconds is not None:
        parts.append(f"{report.seconds:.1f} s")
    return "; ".join(parts) + "\n" + sizes


def without_constant_steps(paths: Sequence[str]) -> tuple[str, list[str]]:
    """Removes the steps that all paths begin with, and the side if it is one for all.

    >>> without_constant_steps(["aqt/a/Dense_0/kernel/rhs", "aqt/a/Dense_1/kernel/rhs"])
    ('a', ['Dense_0/kernel', 'Dense_1/kernel'])

    Returns:
        The steps behind the collection that were removed, and the paths without them.
    """
    if not paths:
        return "", []
    steps = [path.split("/")[1:] for path in paths]
    if len({s[-1] for s in steps}) == 1:
        steps = [s[:-1] for s in steps]
    above = [s[:-1] for s in steps] if len(steps) > 1 else [[]]
    same = (len(set(column)) == 1 for column in zip(*above, strict=False))
    count = sum(itertools.takewhile(bool, same))
    return "/".join(steps[0][:count]), ["/".join(s[count:]) for s in steps]


def shortened(path: str, width: int) -> str:
    """Shortens the longest steps of a path in the middle.

    >>> shortened("encoder/layers_11/multi_head_attention_0/query", 36)
    'encoder/layers_11/multi…tion_0/query'
    """
    steps = path.split("/")
    for i in sorted(range(len(steps)), key=lambda i: -len(steps[i])):
        excess = len("/".join(steps)) - width
        steps[i] = _cut(steps[i], max(len(steps[i]) - excess, _SHORTEST))
    return _cut("/".join(steps), width)


def _cut(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return text[:head] + "…" + text[len(text) - (width - 1 - head) :]
