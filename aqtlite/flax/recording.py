"""The weights that a model contracts, as parts of a traced program.

A second trace of a call stores every weight in the collection "aqt" of the module that
contracts it, so that transformations around it stack it as they stack its parameters.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax.extend import core

from aqtlite import config, operands
from aqtlite.flax import identity, observing, program, tracing
from aqtlite.flax.observing import Contraction, Key
from aqtlite.flax.site import COLLECTION, Operand
from aqtlite.qtensor import QTensor


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["qtensor", "original", "corners", "stacked"],
    meta_fields=["key", "cfg", "operand", "name"],
)
@dataclasses.dataclass(frozen=True)
class _Stored:
    """What is stored of a weight; its leaves become outputs of the program."""

    qtensor: QTensor | None
    original: Any
    corners: list[Any]
    stacked: Any
    key: Key
    cfg: config.DotGeneral
    operand: Operand
    name: str | None


@dataclasses.dataclass(frozen=True)
class Record:
    """A weight in the trace of one call."""

    trace: tracing.Trace = dataclasses.field(repr=False)
    key: Key
    cfg: config.DotGeneral = dataclasses.field(repr=False)
    operand: Operand
    """As the contraction sees it."""

    name: str | None
    shape: tuple[int, ...]
    """Of all of it, stacked by transformations."""

    params: frozenset[int]
    """The leaves of "params" that it is made of."""

    qtensor: Any
    """A `QTensor` of indices of outputs of the trace."""

    original: int
    """The output that is the float operand."""

    corners: int
    """The output that is `identity.stack` of its corners."""

    def cut(self) -> tuple[core.ClosedJaxpr, list[int]]:
        """The program of the float operand, and the leaves of "params" it takes."""
        return program.cut(self.trace.program, [self.original])

    def made_like(self, other: "Record") -> bool:
        """Whether another record is made of the same parameters in the same way."""
        if self.params != other.params or self.shape != other.shape:
            return False
        (first, _), (second, _) = self.cut(), other.cut()
        return str(first.jaxpr) == str(second.jaxpr) and all(
            a is b or (not _is_traced(a, b) and np.array_equal(a, b))
            for a, b in zip(first.consts, second.consts, strict=True)
        )


def _is_traced(*values: Any) -> bool:
    return any(isinstance(value, jax.core.Tracer) for value in values)


def record_weights(
    model: nn.Module,
    variables: Mapping[str, Any],
    call: tracing.Call,
    keys: frozenset[Key],
) -> list[Record]:
    """Traces a call, and gives the weights with these keys as parts of the program.

    Args:
        model: the model.
        variables: its float variables, or their shapes.
        call: what else it takes.
        keys: of the operands to record, which are weights.
    """

    def store(contraction: Contraction, key: Key) -> _Stored:
        x = contraction.lhs if key.side == "lhs" else contraction.rhs
        operand = contraction.operand(key.side)
        quantized = quantize(contraction.cfg, operand, x)
        return _stored(contraction, key, quantized, x)

    trace, stored = _record(model, variables, call, keys, store)
    dependencies = program.output_dependencies(trace.program)
    return [
        Record(
            trace=trace,
            key=node.key,
            cfg=node.cfg,
            operand=node.operand,
            name=node.name,
            shape=trace.program.out_avals[node.original].shape,
            params=dependencies[node.original],
            qtensor=node.qtensor,
            original=node.original,
            corners=node.stacked,
        )
        for node in stored
    ]


def quantize(cfg: config.DotGeneral, operand: Operand, x: Any) -> QTensor:
    """Quantizes an operand as its contraction does, stored in the order of serving."""
    tensor = cfg.fwd.lhs if operand.side == "lhs" else cfg.fwd.rhs
    path = f"fwd.{operand.side}"
    quantized = operands.quantize(x, tensor, operand.contracting, path)
    if quantized is None:
        raise ValueError(f"{path} is not quantized: there is nothing to freeze")
    return quantized.stored_in(operand.serving_order())


def identities(
    model: nn.Module,
    variables: Mapping[str, Any],
    call: tracing.Call,
    keys: frozenset[Key],
) -> list[identity.Identity | None]:
    """The identities that serving will see, in the order of `record_weights`.

    Args:
        model: the model.
        variables: the variables, with `FrozenKernel`s among the parameters.
        call: what else the model takes.
        keys: as `record_weights` takes them.

    Returns:
        For each weight its identity, or None if it has none: its corners depend on
        what stays in float, or are NaN alone.
    """

    def store(contraction: Contraction, key: Key) -> _Stored:
        x = contraction.lhs if key.side == "lhs" else contraction.rhs
        return _stored(contraction, key, None, x)

    trace, stored = _record(model, variables, call, keys, store)
    dependencies = program.output_dependencies(trace.program)
    fixed = [i for i, node in enumerate(stored) if not _any(dependencies, node.corners)]
    wanted = [output for i in fixed for output in stored[i].corners]
    cut, _ = program.cut(trace.program, wanted)
    with jax.ensure_compile_time_eval(), jax.debug_nans(False):
        values = iter(jax.jit(core.jaxpr_as_fun(cut))())
        result: list[identity.Identity | None] = [None] * len(stored)
        for i in fixed:
            corners = [np.asarray(next(values)) for _ in stored[i].corners]
            result[i] = identity.from_values(corners)
    return result


def _any(dependencies: list[program.Dependencies], outputs: Iterable[int]) -> bool:
    return any(dependencies[output] for output in outputs)


def _stored(
    contraction: Contraction, key: Key, qtensor: QTensor | None, x: Any
) -> _Stored:
    corners = identity.corners(x)
    return _Stored(
        qtensor=qtensor,
        original=x,
        corners=corners,
        stacked=identity.stack(corners),
        key=key,
        cfg=contraction.cfg,
        operand=contraction.operand(key.side),
        name=contraction.name,
    )


def _record(
    model: nn.Module,
    variables: Mapping[str, Any],
    call: tracing.Call,
    keys: frozenset[Key],
    store: Callable[[Contraction, Key], _Stored],
) -> tuple[tracing.Trace, list[Any]]:
    """The trace, and what was stored, with indices of outputs in place of arrays."""

    def record(contraction: Contraction, position: int) -> tuple[Any, Any]:
        caller = contraction.caller
        for side in contraction.quantized_sides():
            path = () if caller is None else caller.scope.path
            key = Key(path, position, side)
            if caller is None or not caller.is_inside or key not in keys:
                continue
            if caller.scope.is_mutable_collection(COLLECTION):
                # What is called again under a transformation has the same key again.
                name = f"{side} {position}"
                while caller.scope.has_variable(COLLECTION, name):
                    name += "+"
                node = store(contraction, key)
                caller.scope.put_variable(COLLECTION, name, node)
        return contraction.lhs, contraction.rhs

    with observing.observed_by(record):
        trace = tracing.trace_call(model, variables, call)
    leaves, treedef = jax.tree.flatten(trace.recorded)
    first = len(trace.program.jaxpr.outvars) - len(leaves)
    indices = jax.tree.unflatten(treedef, range(first, first + len(leaves)))
    nodes = jax.tree.leaves(indices, is_leaf=lambda node: isinstance(node, _Stored))
    return trace, [node for node in nodes if isinstance(node, _Stored)]
