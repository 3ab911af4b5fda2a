"""Reports as tables, for terminals and notebooks."""

import html
from collections.abc import Iterator
from typing import TYPE_CHECKING

import rich.box
import rich.console
import rich.table
import rich.text
from rich.filesize import decimal

from aqtlite import errors
from aqtlite.output import tables
from aqtlite.reporting.contraction import ReportedContraction

if TYPE_CHECKING:
    from aqtlite.reporting.report import Report

HEADS = ("path", "role", "op", "lhs", "rhs", "asked", "runs in", "share", "notes")


def rows_of(report: "Report") -> list[tuple[str, ...]]:
    """Returns a row of cells for each contraction."""
    return [
        (
            errors.label(one.path),
            one.role,
            one.equation or one.op,
            one.lhs,
            one.rhs,
            one.asked,
            one.runs_in,
            "?" if one.macs is None else f"{report.share_of(one):.1%}",
            "; ".join(notes(one)),
        )
        for one in report.contractions
    ]


def notes(one: ReportedContraction) -> list[str]:
    """Returns what is special of a contraction, in words."""
    found = []
    if one.is_frozen:
        found.append("frozen")
    if one.times != 1:
        found.append(f"{one.times} times")
    if one.macs and one.compiled_macs > 1.01 * one.macs:
        found.append(f"{one.compiled_macs / one.macs:.3g} times the products")
    found += [
        f"scale of {scale.side} shared along axis {axis} of argument {name}"
        for scale in one.scales
        for name, axis in scale.shared
    ]
    if one.range_reductions:
        found.append(_counted(one.range_reductions, "range reduction"))
    if one.transpositions:
        found.append(_counted(one.transpositions, "transposition"))
    if one.seconds is not None:
        found.append(f"{1e6 * one.seconds:.3g} us")
    if one.why_float:
        found.append(one.why_float)
    return found


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


def title(report: "Report") -> str:
    """Returns the first line of a report."""
    where = report.device or f"lowered for {report.platform}, not compiled"
    return f"{report.name} on {report.platform} ({where})"


def summary(report: "Report") -> list[str]:
    """Returns lines about the whole program."""
    shares = ", ".join(f"{part:.1%} in {x}" for x, part in report.shares.items())
    lines = [f"{report.macs:,} multiply-accumulates: {shares or 'none'}"]
    if report.memory is not None:
        of = report.memory
        lines.append(
            f"memory: {decimal(of.peak)}; arguments {decimal(of.arguments)}, outputs "
            f"{decimal(of.outputs)}, temporary {decimal(of.temporary)}"
        )
    if report.saved_bytes:
        lines.append(f"saved for the backward pass: {decimal(report.saved_bytes)}")
    lines += [
        f"{one.kind}: {one.type}"
        + (f" of {one.argument}" if one.argument else "")
        + (f" in {one.path}" if one.path else "")
        for one in report.copies
    ]
    lines += [
        f"{one.op} of {one.dtype}, {decimal(one.bytes)}, {one.times} times, between "
        f"{one.devices} devices that send {decimal(one.sent)} each"
        + (f", in {one.path}" if one.path else "")
        for one in report.collectives
    ]
    lines += [
        f"a {one.opcode} in {one.dtype} of no contraction: {one.op_name or 'unnamed'}"
        for one in report.others
    ]
    return lines


def of_report(report: "Report") -> Iterator[rich.console.RenderableType]:
    """Yields the table of contractions, and the lines below it."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, title=title(report))
    for name in HEADS:
        justify = "right" if name == "share" else "left"
        table.add_column(name, overflow="fold", justify=justify)  # type: ignore[arg-type]
    for row in rows_of(report):
        table.add_row(*map(rich.text.Text, row))
    yield table
    yield rich.text.Text("\n".join(summary(report)))


def as_html(report: "Report") -> str:
    """Formats a report as HTML for notebooks."""
    below = "".join(f"<p>{html.escape(line)}</p>" for line in summary(report))
    table = tables.as_html([HEADS, *rows_of(report)])
    return f"<p>{html.escape(title(report))}</p>{table}{below}"
