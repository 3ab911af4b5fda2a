"""A conversion taken apart: what to make of which parameters, one weight at a time."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.extend import core

from aqtlite import config
from aqtlite.flax import conversion, partitioning, program
from aqtlite.flax.conversion import Entry
from aqtlite.flax.convert import assemble, checked, stored
from aqtlite.flax.report import ConversionReport, report_of
from aqtlite.flax.tracing import Call
from aqtlite.qtensor import QTensor


class Made(NamedTuple):
    """A frozen weight, and what its quantization cost."""

    qtensor: QTensor
    signal: jax.Array
    """float32: the sum of the squares of the float operand."""
    noise: jax.Array
    """float32: the sum of the squares of what quantization changed."""
    identity: jax.Array | None = None
    """What tells the weight from others, where its parameters stay in float."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """One operand to freeze."""

    path: tuple[str, ...]
    """Where it lies in the collection "aqt"."""

    inputs: tuple[int, ...]
    """The leaves of "params" that it is made of."""

    tensor: config.Tensor
    """How it is quantized."""

    make: Callable[..., Made]
    """Takes the values of these leaves."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `convert` would do."""

    serving: dict[str, Any]
    """The serving variables, as shapes."""

    weights: tuple[Weight, ...]
    report: ConversionReport


class _Programs:
    """Compiles programs, those that are the same only once: layers tend to be."""

    def __init__(self):
        self._compiled: dict[str, Any] = {}

    def run(self, function: Callable[..., Any], values: tuple[Any, ...]) -> Any:
        """Calls a function, compiled."""
        lowered = jax.jit(function).lower(*values)
        text = lowered.as_text()
        if text not in self._compiled:
            self._compiled[text] = lowered.compile()
        return self._compiled[text](*values)


def plan(
    model: nn.Module,
    variables: Mapping[str, Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    keep_float: conversion.KeepFloat,
) -> Plan:
    """Plans a conversion without running any of it.

    Args:
        model: as `convert` takes it.
        variables: shapes of the float variables.
        args: as `convert` takes them.
        kwargs: the same.
        keep_float: takes a weight's path in the collection "aqt" and the leaves of
            "params" that it is made of, and says whether to leave it in float.

    Raises:
        ValueError: as `convert` does.
    """
    variables = checked(variables)
    call = Call(*args, **kwargs)
    decision = conversion.decide(model, variables, [call], keep_float)
    programs = _Programs()
    weights = [_weight(entry, programs) for entry in decision.entries]
    made = []
    for entry in decision.entries:
        cut, kept = program.cut(entry.record.trace.program, entry.outputs())
        shapes = jax.eval_shape(core.jaxpr_as_fun(cut), *cut.in_avals)
        boxes = partitioning.boxes(cut, kept, variables["params"])
        made.append(stored(entry, shapes, boxes))
    report = report_of(variables, decision, made)
    return Plan(assemble(variables, decision, made), tuple(weights), report)


def _weight(entry: Entry, programs: _Programs) -> Weight:
    wanted = [*entry.outputs(), entry.record.original]
    cut, kept = program.cut(entry.record.trace.program, wanted)
    side = entry.site.operand.side

    def flat(*params: jax.Array) -> tuple[list[jax.Array], jax.Array, jax.Array]:
        *leaves, x = core.jaxpr_as_fun(cut)(*params)
        return leaves, *signal_and_noise(x, entry.unflatten(leaves)[side])

    def make(*params: Any) -> Made:
        leaves, signal, noise = programs.run(flat, params)
        made = entry.unflatten(leaves)
        return Made(made[side], signal, noise, made.get("identity"))

    raw = entry.site.cfg.fwd
    tensor = raw.lhs if side == "lhs" else raw.rhs
    path = (*entry.path, entry.name, side)
    return Weight(path, tuple(kept), tensor, make)


def signal_and_noise(x: jax.Array, qtensor: QTensor) -> tuple[jax.Array, jax.Array]:
    """The sums of squares of an array, and of what its quantization changed."""
    x = x.astype(jnp.float32)
    noise = x - dataclasses.replace(qtensor, dtype=jnp.dtype("float32")).dequant()
    return jnp.sum(x * x), jnp.sum(noise * noise)
