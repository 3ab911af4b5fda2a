"""What a conversion froze, what stayed in float, and why."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from absl import logging

from aqtlite.flax import conversion
from aqtlite.flax.conversion import Decision


@dataclasses.dataclass(frozen=True)
class ParameterReport:
    """What became of a parameter."""

    path: str
    """Joined by slashes."""

    is_frozen: bool
    """Whether it is gone from "params"."""

    why: str
    """Why it stayed in float; empty for one that is frozen."""

    is_expected: bool
    """Whether nothing could have been frozen, or it was asked to stay."""

    bytes_before: int
    bytes_after: int
    """Of its floats, if they stayed, and of the frozen weights made of it. A weight
    made of several parameters counts with the first."""


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """What a conversion did; prints as a table of the parameters that are contracted.

    >>> import jax, jax.numpy as jnp
    >>> from flax import linen as nn
    >>> from aqtlite import config
    >>> from aqtlite.flax import AqtDotGeneral, convert
    >>> dense = nn.Dense(4, dot_general=AqtDotGeneral(config.fully_quantized()))
    >>> variables = dense.init(jax.random.key(0), jnp.ones((2, 64)))
    >>> serving = convert(dense, variables, jnp.ones((2, 64)), report=print)
    parameter          before          after
    kernel            1,024 B          272 B  frozen
    others (1)           16 B           16 B  in float, not contracted
    total             1,040 B          288 B
    """

    parameters: tuple[ParameterReport, ...]
    other_operands: tuple[str, ...] = ()
    """Operands that are neither activations nor made of parameters alone."""

    @property
    def bytes_before(self) -> int:
        """Of all float parameters."""
        return sum(one.bytes_before for one in self.parameters)

    @property
    def bytes_after(self) -> int:
        """Of what stayed in float, and of the frozen weights."""
        return sum(one.bytes_after for one in self.parameters)

    @property
    def stayed_float(self) -> tuple[ParameterReport, ...]:
        """The parameters that are contracted, and quantized at every call."""
        return tuple(
            one for one in self.parameters if not one.is_frozen and not one.is_expected
        )

    def __str__(self) -> str:
        shown = [p for p in self.parameters if p.is_frozen or p.why != _NOT_CONTRACTED]
        others = [p for p in self.parameters if p not in shown]
        rows = [(p.path, p.bytes_before, p.bytes_after, _outcome(p)) for p in shown]
        if others:
            before = sum(p.bytes_before for p in others)
            name = f"others ({len(others)})"
            rows.append((name, before, before, f"in float, {_NOT_CONTRACTED}"))
        rows.append(("total", self.bytes_before, self.bytes_after, ""))
        width = max(len("parameter"), *(len(name) for name, _, _, _ in rows))
        lines = [f"{'parameter':{width}}  {'before':>13}  {'after':>13}"]
        for name, before, after, outcome in rows:
            line = f"{name:{width}}  {before:>11,} B  {after:>11,} B  {outcome}"
            lines.append(line.rstrip())
        lines += [f"not frozen: {text}" for text in self.other_operands]
        return "\n".join(lines)


_NOT_CONTRACTED = "not contracted"


def _outcome(parameter: ParameterReport) -> str:
    return "frozen" if parameter.is_frozen else f"in float: {parameter.why}"


def report_of(
    variables: Mapping[str, Any], decision: Decision, made: Sequence[Any]
) -> ConversionReport:
    """Sums up a conversion.

    Args:
        variables: the float variables, or their shapes.
        decision: what was frozen.
        made: what was stored for each entry, or its shapes.
    """
    leaves = jax.tree.leaves(variables["params"])
    frozen_bytes = [0] * len(leaves)
    read_elsewhere: set[int] = set()
    for entry, stored in zip(decision.entries, made, strict=True):
        frozen_bytes[min(entry.record.params)] += sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(stored)
        )
        read_elsewhere |= entry.record.params - decision.removed
    reasons, others = _reasons(decision)
    parameters = []
    paths = conversion.param_paths(variables["params"])
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        before = leaf.size * leaf.dtype.itemsize
        gone = i in decision.removed
        why, is_expected = "", True
        if not gone and i in reasons:
            why, is_expected = reasons[i]
        elif not gone and i in read_elsewhere:
            why = "something else reads it, too; the contraction takes frozen integers"
        elif not gone:
            why = _NOT_CONTRACTED
        after = frozen_bytes[i] + (0 if gone else before)
        parameters.append(
            ParameterReport("/".join(path), gone, why, is_expected, before, after)
        )
    return ConversionReport(tuple(parameters), tuple(others))


def _reasons(decision: Decision) -> tuple[dict[int, tuple[str, bool]], list[str]]:
    """Why parameters stayed in float, by leaf; and operands without parameters."""
    reasons: dict[int, tuple[str, bool]] = {}
    others: dict[str, None] = {}
    for i, found in enumerate(decision.discoveries):
        for one in found.operands.values():
            refusal = decision.refusals.get((i, one.key))
            if refusal is None or one.depends_on_inputs:
                continue
            text = f"{one}: {refusal.why}"
            if not one.params and one.collections:
                others[text] = None
            for param in one.params:
                if param not in reasons or reasons[param][1]:
                    reasons[param] = text, refusal.is_expected
    return reasons, list(others)


def check_all_frozen(report: ConversionReport) -> None:
    """Refuses a conversion that left a weight in float.

    Raises:
        ValueError: naming the parameters, and why they stayed.
    """
    lines = [f"{one.path}: {one.why}" for one in report.stayed_float]
    lines += report.other_operands
    if lines:
        raise ValueError(
            "strict=True, but weights are quantized at every call:\n" + "\n".join(lines)
        )


def log(report: ConversionReport) -> None:
    """Says in the log what stayed in float."""
    frozen = sum(one.is_frozen for one in report.parameters)
    unfrozen = len(report.stayed_float) + len(report.other_operands)
    if frozen and not unfrozen:
        logging.info(
            "aqtlite froze %d parameters: %d bytes became %d",
            frozen,
            report.bytes_before,
            report.bytes_after,
        )
    else:
        logging.warning(
            "aqtlite froze %d parameters; %d contracted weights stay in float and are "
            "quantized at every call:\n%s",
            frozen,
            unfrozen,
            report,
        )
