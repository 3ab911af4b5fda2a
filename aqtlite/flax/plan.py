"""A conversion taken apart: what to make of which parameters, one weight at a time."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.extend import core

from aqtlite import config
from aqtlite.flax import program, recording
from aqtlite.flax.convert import assemble, check_repeats, checked
from aqtlite.qtensor import QTensor


class Made(NamedTuple):
    """A frozen weight, and what its quantization cost."""

    qtensor: QTensor
    signal: jax.Array
    """float32: the sum of the squares of the float operand."""
    noise: jax.Array
    """float32: the sum of the squares of what quantization changed."""


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
    keep_float: Callable[[tuple[str, ...], tuple[int, ...]], bool],
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
    traced = recording.trace_recording(model, variables, args, kwargs)
    sites, records = recording.records(traced)
    programs = _Programs()
    weights = []
    frozen = []
    for record in records:
        weight = _weight(traced, record, sites[record.path].cfg.fwd, programs)
        if not keep_float(weight.path, weight.inputs):
            weights.append(weight)
            frozen.append(record)
    sites = recording.freezing(sites, frozen)
    serving = assemble(model, variables, traced, sites, frozen, args, kwargs)
    return Plan(serving, tuple(weights))


def _weight(
    traced: recording.Traced,
    record: recording.Record,
    raw: config.DotGeneralRaw,
    programs: _Programs,
) -> Weight:
    (original,) = record.original.outputs
    wanted = [i for operand in record.operands for i in operand.outputs]
    cut, kept = program.cut(traced.program, [*wanted, original])
    treedef = record.operands[0].treedef

    def flat(*params: jax.Array) -> tuple[list[jax.Array], jax.Array, jax.Array]:
        *leaves, x = core.jaxpr_as_fun(cut)(*params)
        values = iter(leaves)
        first, *repeats = (
            jax.tree.unflatten(operand.treedef, [next(values) for _ in operand.outputs])
            for operand in record.operands
        )
        qtensor = check_repeats(first, repeats, record.path, record.side)
        return jax.tree.leaves(qtensor), *signal_and_noise(x, qtensor)

    def make(*params: Any) -> Made:
        leaves, signal, noise = programs.run(flat, params)
        return Made(jax.tree.unflatten(treedef, leaves), signal, noise)

    tensor = raw.lhs if record.side == "lhs" else raw.rhs
    return Weight((*record.path, record.side), tuple(kept), tensor, make)


def signal_and_noise(x: jax.Array, qtensor: QTensor) -> tuple[jax.Array, jax.Array]:
    """The sums of squares of an array, and of what its quantization changed."""
    x = x.astype(jnp.float32)
    noise = x - dataclasses.replace(qtensor, dtype=jnp.dtype("float32")).dequant()
    return jnp.sum(x * x), jnp.sum(noise * noise)
