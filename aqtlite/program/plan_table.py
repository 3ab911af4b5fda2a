"""Formats plans as tables for terminals and notebooks."""

import dataclasses
from collections.abc import Sequence

import rich.box
import rich.console
import rich.table
import rich.text

from aqtlite import errors
from aqtlite.config import DotGeneral, DotGeneralRaw, arithmetic
from aqtlite.operations import SIDES
from aqtlite.output import tables
from aqtlite.program.gradient_rules import rule_gradients
from aqtlite.program.planned import PlannedContraction
from aqtlite.program.planned_lookup import Planned, PlannedLookup

NO_MATRIX = "no Hadamard matrix mixes the channels, nor equal parts of them"
TOO_FEW = "all inputs of a group are kept"
NO_CONTRACTIONS = (
    "the program has no contractions, beside any that are quantized already. "
    "Contractions are calls of lax.dot_general (matmul, einsum, dense layers), "
    "lax.conv_general_dilated and lax.ragged_dot, also in operations that "
    "register_operation names"
)

_HEADS = ("path", "op", "lhs", "rhs", "rule", "runs in", "gradients in")
_PLATFORM = "contracted in"
"""Head of a further column, in a plan for a platform."""


def rows_of(contractions: Sequence[PlannedContraction]) -> list[tuple[str, ...]]:
    """Returns a row of cells for each contraction.

    The rows of a plan for a platform have the dtypes of products there in a last cell.
    """
    return [
        (
            errors.label(one.path),
            one.description,
            str(one.lhs),
            str(one.rhs),
            _who_decides(one),
            _runs_in(one),
            gradients_in(one),
            *([] if one.contracted_in is None else [one.contracted_in]),
        )
        for one in contractions
    ]


def rows_of_lookups(
    planned: Sequence[PlannedLookup], num_cells: int
) -> list[tuple[str, ...]]:
    """Returns a row of cells for each lookup.

    Args:
        planned: the lookups.
        num_cells: number of cells of the rows of contractions.
    """
    rows = [
        (
            errors.label(one.path),
            one.op,
            str(one.lhs),
            str(one.rhs),
            _who_decides(one),
            _reads(one),
            "straight through" if one.is_quantized else "float",
        )
        for one in planned
    ]
    return [(*row, *["-"] * (num_cells - len(row))) for row in rows]


def layout(
    title: str, rows: Sequence[Sequence[str]], width: int
) -> rich.console.RenderableType:
    """Returns a table, or a paragraph per row if the table is wider than the console.

    Args:
        title: text above the table.
        rows: result of `rows_of`.
        width: width of the console in columns.
    """
    if not rows:
        return rich.text.Text(f"{title}; {NO_CONTRACTIONS}")
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, title=title)
    heads = _heads(rows)
    for name in heads:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(rich.text.Text, row))
    widths = [max(map(len, column)) + 3 for column in zip(heads, *rows, strict=True)]
    if sum(widths) < width:
        return table
    lines = [title]
    for path, op, lhs, rhs, rule, runs_in, gradients, *contracted_in in rows:
        by = {"-": "", "injected": ", injected"}.get(rule, f", rule {rule}")
        lines += ["", path, f"    {runs_in}{by}", f"    {op}: {lhs}, {rhs}"]
        lines.append(f"    gradients in {gradients}")
        lines += [f"    on {one}" for one in contracted_in]
    return rich.text.Text("\n".join(lines))


def as_html(title: str, rows: Sequence[Sequence[str]]) -> str:
    """Formats a plan as HTML for notebooks."""
    if not rows:
        return f"<p>{title}; {NO_CONTRACTIONS}</p>"
    return f"<p>{title}</p>{tables.as_html([_heads(rows), *rows])}"


def _heads(rows: Sequence[Sequence[str]]) -> tuple[str, ...]:
    return (*_HEADS, _PLATFORM)[: len(rows[0])]


def _reads(one: PlannedLookup) -> str:
    """Returns the grid of a lookup's table, or why it stays in float."""
    if not one.is_quantized:
        return f"float: {one.why_float}"
    text = f"{one.cfg.fwd.rhs.grid.name} rows"
    if one.contraction is None:
        return text
    return f"{text}, of the table of {errors.label(one.contraction.path)}"


def _who_decides(one: Planned) -> str:
    if one.is_injected:
        return "injected"
    return "-" if one.rule is None else str(one.rule)


def _runs_in(one: PlannedContraction) -> str:
    """Returns a contraction's grids, such as ``int8 x int8``, or why it has none."""
    adapter = [] if one.adapter is None else [str(one.adapter)]
    if not one.is_quantized:
        return ", ".join([f"float: {one.why_float}", *adapter])
    names = (
        tensor.grid.name if tensor.is_quantized else "float"
        for tensor in (one.cfg.fwd.lhs, one.cfg.fwd.rhs)
    )
    grids = " x ".join(names)
    if one.cfg.fwd.rhs.sparsity is not None:
        how = one.cfg.fwd.rhs.sparsity
        grids += f", {how} sparse" if one.prunes else f", not sparse: {TOO_FEW}"
    if one.cfg.fwd.rhs.rounding is not None:
        grids += ", rounded by GPTQ at conversion"
    mixed = one.mixed_channels
    if mixed is not None:
        rotated = f"rotated, {mixed} channels at a time"
        grids += f", not rotated: {NO_MATRIX}" if mixed == 1 else f", {rotated}"
    if one.why_not_smoothed is not None:
        grids += f", not smoothed: {one.why_not_smoothed}"
    return ", ".join((grids, *_scales(one), *adapter))


def gradients_in(one: PlannedContraction) -> str:
    """Returns the grids of the gradients of a contraction, such as ``int8 x int8``.

    The gradient of the result comes first. Where the function has a rule for its
    gradient, that decides what there is.
    """
    if not one.is_quantized or one.why_gradients_float is not None:
        return "float"
    names = ("dlhs", "drhs")
    if one.rule_of_gradient is None:
        found = {name: _grids_of_gradient(one.cfg, name) for name in names}
    else:
        there = {rule_gradients.name_of(one, x) for x in one.gradients}
        found = {
            name: _grids(rule_gradients.config_of(one.cfg, name))
            for name in names
            if name in there
        }
    own = f"its {one.rule_of_gradient}" if one.rule_of_gradient else ""
    if not found:
        return f"as {own} has it"
    texts = [f"{name} {text}" for name, text in found.items()]
    if len(found) == 2 and len({*found.values()}) == 1:
        texts = [found["dlhs"]]
    return ", ".join(texts) + (f", in {own}" if own else "")


def _grids_of_gradient(cfg: DotGeneral, name: str) -> str:
    raw: DotGeneralRaw = getattr(cfg, name)
    reused = arithmetic.reused_rhs(cfg, name)
    return _grids(raw if reused is None else dataclasses.replace(raw, rhs=reused[1]))


def _grids(raw: DotGeneralRaw) -> str:
    tensors = raw.lhs, raw.rhs
    if not any(tensor.is_quantized for tensor in tensors):
        return "float"
    return " x ".join(
        tensor.grid.name if tensor.is_quantized else "float" for tensor in tensors
    )


def _scales(one: PlannedContraction) -> list[str]:
    """Returns what is special of the scales of activations, in words."""
    found = []
    for side, other in (("lhs", "rhs"), ("rhs", "lhs")):
        if getattr(one.cfg.fwd, side).scale_moves:
            found.append(f"the scales of {side} multiply {other}")
    for side in SIDES:
        # Convolutions that look both ways always share one along positions.
        if one.shared_by(side) == "positions and examples":
            found.append(f"positions and examples share the scale of {side}")
    return found
