"""Reports as tables that fit the terminal."""

import itertools
from collections.abc import Sequence

import rich.box
import rich.console
import rich.table
import rich.text
from rich import filesize

from aqtlite.checkpoint.report import Report

_NARROWEST = 16
"""Smallest width of the column of paths, even if the table exceeds the terminal."""


def table(report: Report) -> rich.console.Group:
    """Lays out a report: a row for each weight, and a summary.

    Steps shared by all paths are shown once, and paths are folded if the terminal is
    too narrow.
    """
    result = rich.table.Table(
        box=rich.box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    shared, paths = without_constant_steps([row.path for row in report.weights])
    head = f"weight in {shared}" if shared else "weight"
    result.add_column(head, overflow="fold", min_width=_NARROWEST)
    for head in ("stored", "grid", "scales", "before", "after", "dB"):
        result.add_column(head, no_wrap=True, justify="right")
    for path, row in zip(paths, report.weights, strict=True):
        result.add_row(
            path,
            "x".join(map(str, row.shape)),
            row.grid,
            str(row.scales),
            filesize.decimal(row.bytes_before),
            filesize.decimal(row.bytes_after),
            "" if row.decibels is None else f"{row.decibels:.1f}",
        )
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
    """Removes the common first steps of all paths, and the side if all have the same.

    >>> without_constant_steps(["aqt/a/Dense_0/kernel/rhs", "aqt/a/Dense_1/kernel/rhs"])
    ('a', ['Dense_0/kernel', 'Dense_1/kernel'])

    Returns:
        The removed first steps, without the collection; and the shortened paths.
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
