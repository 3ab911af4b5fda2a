"""Weights as outputs of a trace.

A second trace of a call stores every weight with the module that contracts it, so that
transformations around it stack it as they stack its parameters.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend import core

from aqtlite import config
from aqtlite.config import arithmetic
from aqtlite.contraction import poison
from aqtlite.jaxpr import dependencies, slicing
from aqtlite.program.serving import identity
from aqtlite.program.serving.call_site import Operand
from aqtlite.program.serving.contraction import CallingModule, Contraction, OperandKey
from aqtlite.program.serving.model import Buffer, CallTrace, Model, Parameter
from aqtlite.program.serving.placeholder import Placeholder
from aqtlite.qtensor import stored_bits
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization import operands, padding


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays"],
    meta_fields=["key", "cfg", "operand", "name", "digest", "is_injected"],
)
@dataclasses.dataclass(frozen=True)
class _Stored:
    """An operand, stored in a trace; its arrays become outputs of the jaxpr."""

    arrays: Any
    key: OperandKey
    cfg: config.DotGeneral
    operand: Operand
    name: str | None
    digest: str | None
    is_injected: bool


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["qtensor", "original", "smoothed", "values"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class WeightOutputs:
    """The outputs of a trace that belong to a weight, by index."""

    qtensor: Any
    """A `QTensor` of indices: the frozen weight."""

    original: Any
    """The float operand."""

    smoothed: Any
    """What is quantized of it: the same, if nothing is smoothed."""

    values: Any
    """`identity.values_of` the float operand."""


@dataclasses.dataclass(frozen=True)
class RecordedWeight:
    """A weight in the trace of one call."""

    index: tuple[int, int]
    """The call, and its place among the weights of that call."""

    trace: CallTrace = dataclasses.field(repr=False)
    key: OperandKey
    cfg: config.DotGeneral = dataclasses.field(repr=False)
    operand: Operand
    """As the contraction sees it."""

    name: str | None
    shape: tuple[int, ...]
    """The shape of all of it, stacked by transformations."""

    parameters: tuple[Parameter, ...]
    """The parameters that it is made of, sorted."""

    sources: tuple[Parameter, ...]
    """The parameters, and those that a learned calibration reads, sorted."""

    buffers: tuple[Buffer, ...]
    """The variables that its quantization reads beside them, sorted."""

    outputs: WeightOutputs
    digest: str | None
    """Digest of the computation of the float operand, if it is known."""

    is_injected: bool
    """Whether the contraction sees its operands alone, and not how they are made."""

    def made_like(self, other: "RecordedWeight") -> bool:
        """Whether another one is made of the same parameters in the same way."""
        if (self.sources, self.buffers, self.shape) != (
            other.sources,
            other.buffers,
            other.shape,
        ):
            return False
        first, second = (
            slicing.slice_outputs(one.trace.jaxpr, one.outputs.original).jaxpr
            for one in (self, other)
        )
        return str(first.jaxpr) == str(second.jaxpr) and all(
            a is b or (not _is_traced(a, b) and np.array_equal(a, b))
            for a, b in zip(first.consts, second.consts, strict=True)
        )


def _is_traced(*values: Any) -> bool:
    return any(isinstance(value, jax.core.Tracer) for value in values)


def record_weights(
    model: Model, call: int, keys: frozenset[OperandKey]
) -> list[RecordedWeight]:
    """Traces a call, with the weights as outputs.

    Args:
        model: the model.
        call: index of the call.
        keys: keys of the operands to record, which are weights.
    """

    def record(contraction: Contraction, operand: Operand, x: Any) -> WeightOutputs:
        lhs, rhs = contraction.smoothed_operands()
        smoothed = lhs if operand.side == "lhs" else rhs
        qtensor = quantize(contraction, operand, smoothed)
        qtensor = dataclasses.replace(qtensor, dtype=operand.dtype)
        return WeightOutputs(qtensor, x, smoothed, identity.values_of(x))

    # What a contraction gives may be, or become, a weight of another one.
    trace, stored = _record(model, call, keys, record, lambda one: one, {})
    depends = dependencies.output_dependencies(trace.jaxpr)
    result = []
    for place, node in enumerate(stored):
        original = node.arrays.original
        read = frozenset().union(*(depends[i] for i in jax.tree.leaves(node.arrays)))
        made_of, sources = (
            tuple(sorted(p for i, p in trace.parameters.items() if i in one))
            for one in (depends[original], read)
        )
        buffers = tuple(sorted(b for i, b in trace.buffers.items() if i in read))
        result.append(
            RecordedWeight(
                index=(call, place),
                trace=trace,
                key=node.key,
                cfg=node.cfg,
                operand=node.operand,
                name=node.name,
                shape=trace.jaxpr.out_avals[original].shape,
                parameters=made_of,
                sources=sources,
                buffers=buffers,
                outputs=node.arrays,
                digest=node.digest,
                is_injected=node.is_injected,
            )
        )
    return result


def quantize(contraction: Contraction, operand: Operand, x: Any) -> QTensor:
    """Quantizes an operand as its contraction does, stored as it is served fastest."""
    raw, states = contraction.cfg.fwd, contraction.states
    tensor, state = raw.rhs, states.rhs
    if operand.side == "lhs":
        tensor, state = raw.lhs, states.lhs
    path = f"fwd.{operand.side}"
    # Of several axes, blocks cut that of the last pair.
    axes = contraction.operation.axes(operand.side)
    given, x = x, _padded(contraction, operand, x)
    quantized = operands.quantize_operand(x, tensor, axes, path, state=state)
    if quantized is None:
        raise ValueError(f"{path} is not quantized: there is nothing to freeze")
    quantized = poison.with_poisoned_scale(x, quantized, tensor, axes, path, state)
    other = raw.rhs if operand.side == "lhs" else raw.lhs
    if tensor.is_integer and other.is_integer and other.grid.zero_point_range:
        quantized = operands.with_sums(quantized, axes.contracting)
    quantized = dataclasses.replace(quantized, padding=padding.widths(x, like=given))
    # Sums of floats depend on the order in which the trained model contracts them.
    if arithmetic.sums_integers(raw):
        quantized = quantized.stored_in(operand.serving_order())
    values = stored_bits.to_save(quantized.qvalue)
    return dataclasses.replace(quantized, qvalue=values)


def _padded(contraction: Contraction, operand: Operand, x: Any) -> Any:
    """The operand, padded as the contraction pads it."""
    raw, pair = contraction.cfg.fwd, (contraction.lhs, contraction.rhs)
    pair = (x, pair[1]) if operand.side == "lhs" else (pair[0], x)
    tensors = raw.lhs, raw.rhs
    lhs, rhs = padding.pad_operands(contraction.operation, *pair, tensors, "fwd")
    return lhs if operand.side == "lhs" else rhs


def evaluated_corners(
    model: Model,
    call: int,
    keys: frozenset[OperandKey],
    frozen: Mapping[Parameter, Placeholder],
) -> list[identity.Corners | None]:
    """Evaluates the corners that serving will see of operands.

    Args:
        model: the model.
        call: index of the call.
        keys: keys of the operands, as `record_weights` takes them.
        frozen: placeholders of the parameters that are frozen.

    Returns:
        For each weight, in the order of `record_weights`, its corners, or None if they
        depend on what stays in float, or are NaN alone.
    """

    def corners(contraction: Contraction, operand: Operand, x: Any) -> list[jax.Array]:
        del contraction, operand
        return identity.corners(x)

    trace, stored = _record(model, call, keys, corners, Contraction.in_float, frozen)
    depends = dependencies.output_dependencies(trace.jaxpr)
    fixed = {
        i: node.arrays
        for i, node in enumerate(stored)
        if not any(depends[output] for output in node.arrays)
    }
    evaluated = slicing.slice_outputs(trace.jaxpr, fixed)
    with jax.ensure_compile_time_eval(), jax.debug_nans(False):
        values = evaluated.unflatten(jax.jit(core.jaxpr_as_fun(evaluated.jaxpr))())
        return [
            identity.from_values([np.asarray(corner) for corner in values[i]])
            if i in values
            else None
            for i in range(len(stored))
        ]


def _record(
    model: Model,
    call: int,
    keys: frozenset[OperandKey],
    arrays: Callable[[Contraction, Operand, Any], Any],
    go_on: Callable[[Contraction], Contraction],
    frozen: Mapping[Parameter, Placeholder],
) -> tuple[CallTrace, list[_Stored]]:
    """Traces a call, and stores the arrays that are wanted of each operand.

    Args:
        model: the model.
        call: index of the call.
        keys: keys of the operands.
        arrays: makes what is stored of an operand.
        go_on: makes the contraction to evaluate, of the one that is recorded.
        frozen: the parameters that are frozen.
    """

    def record(
        contraction: Contraction, caller: CallingModule, position: int
    ) -> Contraction:
        for side in contraction.quantized_sides():
            key = OperandKey(caller.path, position, side)
            if key in keys and caller.obstacle is None:
                operand = contraction.operand(side)
                caller.store(
                    _Stored(
                        arrays=arrays(contraction, operand, contraction.array(side)),
                        key=key,
                        cfg=contraction.cfg,
                        operand=operand,
                        name=contraction.name,
                        digest=(contraction.digests or {}).get(side),
                        is_injected=contraction.digests is None,
                    )
                )
        return go_on(contraction)

    trace = model.trace(call, record, frozen)
    return trace, list(trace.stored)
