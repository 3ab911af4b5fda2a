"""The report of a conversion: what was frozen, what stayed in float, and why."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from absl import logging

from aqtlite import config
from aqtlite.contraction import coded_products, unit_blocks
from aqtlite.lowering.forms import panel_products, processor
from aqtlite.program.serving import packing
from aqtlite.program.serving.frozen_record import FrozenEntry
from aqtlite.program.serving.model import Parameter
from aqtlite.program.serving.planning import Plan
from aqtlite.qtensor import codes
from aqtlite.qtensor.qtensor import QTensor


@dataclasses.dataclass(frozen=True)
class ParameterReport:
    """What a conversion did with one parameter."""

    path: str
    """Path of the parameter, joined by slashes."""

    is_frozen: bool
    """Whether it is gone from "params"."""

    why: str
    """Reason why it stayed in float; empty if it is frozen."""

    is_expected: bool
    """Whether nothing of it could have been frozen, or it was kept in float on
    request; true for frozen parameters."""

    bytes_before: int
    """Bytes of its floats, or of what a checkpoint keeps of it if it was quantized."""

    bytes_after: int
    """Bytes of its floats, if they stay, and of the frozen weights made of it, as a
    checkpoint keeps them: int4 and fp4 take half a byte, and a float of 6 bits a
    whole one. A weight made of several parameters counts with the first."""

    rounding: str = ""
    """Whether the frozen weights are sparse, have the integers that were given, and
    how they were rounded if not as in training."""

    slow_on: str = ""
    """Where the frozen weights are served slower than float32, and why; empty if that
    is not known."""


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """The outcome of a conversion; prints as a table of contracted parameters.

    >>> import jax, jax.numpy as jnp
    >>> from flax import linen as nn
    >>> from aqtlite import config
    >>> from aqtlite.flax import AqtDotGeneral, convert
    >>> dense = nn.Dense(4, dot_general=AqtDotGeneral(config.fully_quantized()))
    >>> variables = dense.init(jax.random.key(0), jnp.ones((2, 64)))
    >>> serving = convert(dense, variables, jnp.ones((2, 64)), report=print)
    parameter          before          after
    kernel            1,024 B          272 B  frozen
    others (1)           16 B           16 B  in float, not quantized
    total             1,040 B          288 B
    """

    parameters: tuple[ParameterReport, ...]
    other_operands: tuple[str, ...] = ()
    """Unfrozen operands computed from other variables and no parameters, with reasons.
    """

    @property
    def bytes_before(self) -> int:
        """Bytes of all parameters."""
        return sum(one.bytes_before for one in self.parameters)

    @property
    def bytes_after(self) -> int:
        """Bytes of the parameters that stayed in float, and of the frozen weights."""
        return sum(one.bytes_after for one in self.parameters)

    @property
    def stayed_float(self) -> tuple[ParameterReport, ...]:
        """The float parameters that are contracted and quantized at every call."""
        return tuple(
            one for one in self.parameters if not one.is_frozen and not one.is_expected
        )

    def __str__(self) -> str:
        rows = [
            (p.path, p.bytes_before, p.bytes_after, _outcome(p))
            for p in self.parameters
            if p.is_frozen or p.why not in _SUMMED_UP.values()
        ]
        for label, why in _SUMMED_UP.items():
            alike = [p.bytes_before for p in self.parameters if p.why == why]
            if alike:
                size = sum(alike)
                rows.append((f"{label} ({len(alike)})", size, size, f"in float, {why}"))
        rows.append(("total", self.bytes_before, self.bytes_after, ""))
        width = max(len("parameter"), *(len(name) for name, _, _, _ in rows))
        lines = [f"{'parameter':{width}}  {'before':>13}  {'after':>13}"]
        for name, before, after, outcome in rows:
            line = f"{name:{width}}  {before:>11,} B  {after:>11,} B  {outcome}"
            lines.append(line.rstrip())
        lines += [f"not frozen: {text}" for text in self.other_operands]
        return "\n".join(lines)


_NOT_QUANTIZED = "not quantized"
_NOT_READ = "not read by the calls that were given (calls=)"
_LEARNED = "of learned calibrations"
_ADAPTERS = "trained beside what is frozen"
_SUMMED_UP = {
    "others": _NOT_QUANTIZED,
    "adapters": _ADAPTERS,
    "learned": _LEARNED,
    "unread": _NOT_READ,
}


def _outcome(parameter: ParameterReport) -> str:
    if parameter.is_frozen:
        return ", ".join(
            filter(None, ("frozen", parameter.rounding, parameter.slow_on))
        )
    return f"in float: {parameter.why}"


def report_of(plan: Plan, stored: Sequence[FrozenEntry]) -> ConversionReport:
    """Sums up a conversion.

    Args:
        plan: the plan of the conversion.
        stored: the frozen weights of the plan, or their shapes.
    """
    frozen_bytes: dict[Parameter, int] = {}
    frozen_beside: set[Parameter] = set()
    roundings: dict[Parameter, str] = {}
    slow: dict[Parameter, str] = {}
    matrices = packing.matrices_of(plan)
    for weight, one in zip(plan.weights, stored, strict=True):
        size = codes.stored_bytes(one.values)
        first = weight.parameters[0]
        frozen_bytes[first] = frozen_bytes.get(first, 0) + size
        frozen_beside.update(weight.parameters)
        roundings.update(dict.fromkeys(weight.parameters, one.rounding))
        why = _slow_in_blocks(one)
        if not why and weight.index in matrices:
            why = _slow_products(one)
        slow.update(dict.fromkeys(weight.parameters, why))
    reasons, others = _reasons(plan)
    elsewhere = plan.model.quantized_elsewhere()
    read = frozenset().union(*(d.read_parameters() for d in plan.discoveries))
    learned = frozenset().union(*(d.learned for d in plan.discoveries))
    unsummed: dict[Parameter, str] = {}
    for found in plan.discoveries:
        unsummed.update(found.unsummed)
    parameters = []
    for parameter in plan.model.parameters:
        gone = parameter in plan.removed
        why, is_expected = "", True
        if not gone and parameter in reasons:
            why, is_expected = reasons[parameter]
        elif not gone and parameter in elsewhere:
            why, is_expected = elsewhere[parameter], False
        elif not gone and parameter in frozen_beside:
            why = "something else reads it, too; the contraction takes frozen integers"
        elif not gone and parameter in unsummed:
            why = unsummed[parameter]
        elif not gone and parameter in learned:
            why = _ADAPTERS if parameter.is_of_adapter else _LEARNED
        elif not gone:
            why = _NOT_QUANTIZED if parameter in read else _NOT_READ
        given = plan.model.given.get(parameter)
        before = parameter.nbytes if given is None else codes.stored_bytes(given)
        if given is not None and not gone:
            why = f"{why}; decoded from integers"
        kept = 0 if gone else parameter.nbytes
        parameters.append(
            ParameterReport(
                path="/".join(parameter.path),
                is_frozen=gone,
                why=why,
                is_expected=is_expected,
                bytes_before=before,
                bytes_after=frozen_bytes.get(parameter, 0) + kept,
                rounding=roundings.get(parameter, ""),
                slow_on=slow.get(parameter, ""),
            )
        )
    return ConversionReport(tuple(parameters), tuple(others))


_FAST_BLOCKS = {np.dtype(jnp.int4): 128, np.dtype(jnp.int8): 256}
"""Size from which CPUs contract blocks of integers about as fast as float32.

The kernel takes smaller ones: multiples of `panel_products.BLOCK`, no zero points.
"""


def _slow_in_blocks(weight: FrozenEntry) -> str:
    """Where the blocks of a frozen weight take more time than float32; empty for
    nowhere known."""
    mine, _ = _tensors(weight)
    for q in weight.values.values() if mine.is_integer else ():
        if not isinstance(q, QTensor) or q.qvalue.dtype not in _FAST_BLOCKS:
            continue
        dtype = q.qvalue.dtype
        for size, block in zip(q.shape, q.blocks, strict=True):
            if not 1 < block < min(size, _FAST_BLOCKS[dtype]):
                continue
            where = "CPUs"
            if block % panel_products.BLOCK == 0 and q.zero_point is None:
                if panel_products.reads_here(
                    panel_products.PANEL, block, jnp.iinfo(dtype).bits
                ):
                    continue
                where = "CPUs without the extra 'cpu'"
            return f"slow on {where}: {dtype} in blocks of {block}"
    return ""


def _slow_products(weight: FrozenEntry) -> str:
    """Where a frozen matrix takes more time than float32; empty for nowhere known."""
    mine, other = _tensors(weight)
    if not mine.is_integer:
        return _slow_floats(weight)
    is_by_bytes = other.is_integer and other.grid.storage_dtype.itemsize == 1
    is_int8 = mine.grid.storage_dtype == jnp.int8
    if is_int8 and not is_by_bytes and processor.has_slow_dots_of_bytes():
        return "slow here from 64 rows on: int8 by floats, without VNNI"
    return ""


def _slow_floats(weight: FrozenEntry) -> str:
    """Where a frozen matrix of floats takes more time than float32."""
    operand = weight.record.operand
    q = weight.values[operand.side]
    is_read = operand.side == "rhs" and (
        unit_blocks.reads(q, operand.contracting)
        or coded_products.reads(q, operand.contracting)
    )
    if is_read and panel_products.runs_here():
        return ""
    where = "without the extra 'cpu'" if is_read else "under jax.jit"
    return f"slow on CPUs {where}: decoded at every call"


def _tensors(weight: FrozenEntry) -> tuple[config.Tensor, config.Tensor]:
    """The configs of a frozen weight and of what it is contracted with."""
    raw, side = weight.record.cfg.fwd, weight.record.operand.side
    return (raw.lhs, raw.rhs) if side == "lhs" else (raw.rhs, raw.lhs)


def _reasons(plan: Plan) -> tuple[dict[Parameter, tuple[str, bool]], list[str]]:
    """Returns why parameters stayed in float, and why other operands did."""
    reasons: dict[Parameter, tuple[str, bool]] = {}
    others: dict[str, None] = {}
    for call, found in enumerate(plan.discoveries):
        for one in found.operands:
            refusal = plan.refusals.get((call, one.key))
            if refusal is None or one.depends_on_inputs:
                continue
            text = f"{one}: {refusal.why}"
            if not one.parameters and one.depends_on_buffers:
                others[text] = None
            for parameter in one.parameters:
                if parameter not in reasons or reasons[parameter][1]:
                    reasons[parameter] = text, refusal.is_expected
    return reasons, list(others)


def check_all_frozen(report: ConversionReport) -> None:
    """Raises if a conversion left a weight in float.

    Raises:
        ValueError: if one did, with the parameters and the reasons.
    """
    lines = [f"{one.path}: {one.why}" for one in report.stayed_float]
    lines += report.other_operands
    if lines:
        raise ValueError(
            "strict=True, but weights are quantized at every call:\n" + "\n".join(lines)
        )


def log(report: ConversionReport) -> None:
    """Logs a conversion; a warning with the table if weights stay in float."""
    frozen = sum(one.is_frozen for one in report.parameters)
    unfrozen = len(report.stayed_float) + len(report.other_operands)
    if unfrozen:
        logging.warning(
            "aqtlite froze %d parameters; %d contracted weights stay in float and are "
            "quantized at every call:\n%s",
            frozen,
            unfrozen,
            report,
        )
    elif not frozen and report.bytes_after == report.bytes_before:  # Nor beside floats.
        logging.warning("aqtlite froze no parameters:\n%s", report)
    else:
        logging.info(
            "aqtlite froze %d parameters: %d bytes became %d",
            frozen,
            report.bytes_before,
            report.bytes_after,
        )
