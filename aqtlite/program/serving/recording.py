"""Traces calls with their quantized weights as outputs."""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from aqtlite.config import arithmetic
from aqtlite.contraction import poison
from aqtlite.jaxpr import analysis, slicing
from aqtlite.operations import Side
from aqtlite.program.serving import identity
from aqtlite.program.serving.contraction import Contraction, OperandKey
from aqtlite.program.serving.frozen_record import Operand
from aqtlite.program.serving.model import (
    Buffer,
    CallTrace,
    FoundOperand,
    Model,
    Parameter,
)
from aqtlite.program.serving.placeholder import Placeholder
from aqtlite.qtensor import stored_values
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization import padding, quantizer


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["qtensor", "original", "smoothed", "values"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class WeightOutputs:
    """What a trace outputs for a weight: arrays, or their output indices."""

    qtensor: Any
    """The frozen weight, a `QTensor`."""

    original: Any
    """The float operand."""

    smoothed: Any
    """The operand that is quantized; `original` if nothing is smoothed."""

    values: Any
    """`identity.values_of(original)`."""


Member = tuple[int, OperandKey]
"""Index of a call, and the key of an operand in it."""


@dataclasses.dataclass(frozen=True)
class RecordedWeight:
    """A weight in the trace of one call."""

    index: tuple[int, int]
    """Index of the call, and of the weight in that call."""

    trace: CallTrace = dataclasses.field(repr=False)
    found: FoundOperand
    shape: tuple[int, ...]
    """Shape including axes stacked by transformations."""

    parameters: tuple[Parameter, ...]
    """Parameters that it is made of, sorted."""

    sources: tuple[Parameter, ...]
    """`parameters` and those that a learned calibration reads, sorted."""

    buffers: tuple[Buffer, ...]
    """Other variables that its quantization reads, sorted."""

    outputs: WeightOutputs

    @property
    def key(self) -> OperandKey:
        """Key of the operand in its call."""
        return self.found.key

    @property
    def member(self) -> Member:
        """Key of the operand among those of all calls."""
        return self.index[0], self.key

    @property
    def operand(self) -> Operand:
        """The operand as the contraction sees it."""
        return self.found.operand

    def made_like(self, other: "RecordedWeight") -> bool:
        """Whether both are made of the same parameters in the same way."""
        return (
            self.found.identity is not None
            and self.found.identity == other.found.identity
            and (self.sources, self.buffers, self.shape)
            == (other.sources, other.buffers, other.shape)
        )


def record_weights(
    model: Model, call: int, weights: Sequence[FoundOperand]
) -> list[RecordedWeight]:
    """Traces a call with its quantized weights as outputs.

    Args:
        model: the model.
        call: index of the call.
        weights: operands of the call that are weights.
    """
    by_key: dict[OperandKey, FoundOperand] = {}
    for one in weights:
        before = by_key.setdefault(one.key, one)
        if before.identity != one.identity:
            # Flax may trace a module twice, and compute it differently each time.
            by_key[one.key] = dataclasses.replace(one, identity=None)
    trace = model.record(call, weights)
    depends = analysis.output_dependencies(trace.jaxpr)
    result = []
    for place, stored in enumerate(trace.stored):
        outputs: WeightOutputs = stored.arrays
        read = frozenset().union(*(depends[i] for i in jax.tree.leaves(outputs)))
        made_of, sources = (
            tuple(sorted({p for i, p in trace.parameters.items() if i in one}))
            for one in (depends[outputs.original], read)
        )
        buffers = tuple(sorted({b for i, b in trace.buffers.items() if i in read}))
        result.append(
            RecordedWeight(
                index=(call, place),
                trace=trace,
                found=by_key[stored.key],
                shape=trace.jaxpr.out_avals[outputs.original].shape,
                parameters=made_of,
                sources=sources,
                buffers=buffers,
                outputs=outputs,
            )
        )
    return result


def outputs_of(contraction: Contraction, side: Side) -> WeightOutputs:
    """Returns the outputs to record for a weight: quantized, and float values."""
    operand, x = contraction.operand(side), contraction.array(side)
    lhs, rhs = contraction.smoothed_operands()
    smoothed = lhs if side == "lhs" else rhs
    qtensor = quantize(contraction, operand, smoothed)
    qtensor = dataclasses.replace(qtensor, dtype=operand.dtype)
    return WeightOutputs(qtensor, x, smoothed, identity.values_of(x))


def quantize(contraction: Contraction, operand: Operand, x: Any) -> QTensor:
    """Quantizes an operand as its contraction does, in the layout fastest to serve."""
    raw, states = contraction.cfg.fwd, contraction.states
    tensor, state = raw.rhs, states.rhs
    if operand.side == "lhs":
        tensor, state = raw.lhs, states.lhs
    path = f"fwd.{operand.side}"
    # In the operation's order: blocks divide the axis of the last contracting pair.
    axes = contraction.operation.axes(operand.side)
    given, x = x, _padded(contraction, operand, x)
    if not tensor.is_quantized:
        raise ValueError(f"{path} is not quantized: there is nothing to freeze")
    quantized = quantizer.quantize_array(x, tensor, axes, path, state=state)
    quantizer.check_scale(quantized.scale.shape, tensor, axes, path)
    if tensor.calibration.is_blind:
        marked = x, quantized, tensor, axes, path, state
        quantized = poison.with_poisoned_scale(*marked)
    other = raw.rhs if operand.side == "lhs" else raw.lhs
    if tensor.is_integer and other.is_integer and other.grid.zero_point_range:
        quantized = quantizer.with_sums(quantized, axes.contracting)
    quantized = dataclasses.replace(quantized, padding=padding.widths(x, like=given))
    # Sums of floats depend on the order in which the trained model contracts them.
    if arithmetic.sums_integers(raw):
        quantized = quantized.stored_in(operand.serving_order())
    values = stored_values.to_save(quantized.qvalue)
    return dataclasses.replace(quantized, qvalue=values)


def _padded(contraction: Contraction, operand: Operand, x: Any) -> Any:
    """Returns the operand padded as the contraction pads it."""
    raw, pair = contraction.cfg.fwd, (contraction.lhs, contraction.rhs)
    pair = (x, pair[1]) if operand.side == "lhs" else (pair[0], x)
    tensors = raw.lhs, raw.rhs
    lhs, rhs = padding.pad_operands(contraction.operation, *pair, tensors, "fwd")
    return lhs if operand.side == "lhs" else rhs


def fingerprints(
    model: Model,
    call: int,
    keys: Collection[OperandKey],
    frozen: Mapping[Parameter, Placeholder],
) -> list[identity.Fingerprint | None]:
    """Evaluates the fingerprints that operands will have at serving time.

    Args:
        model: the model.
        call: index of the call.
        keys: keys of weights of injected contractions.
        frozen: placeholders of the frozen parameters.

    Returns:
        For each weight, in the order of `record_weights`, its fingerprint; None if that
        depends on values that stay in float, or as in `identity.from_values`.
    """

    trace = model.record_fingerprints(call, keys, frozen)
    depends = analysis.output_dependencies(trace.jaxpr)
    stored = [one.arrays for one in trace.stored]
    fixed = {
        i: outputs
        for i, outputs in enumerate(stored)
        if not any(depends[output] for output in outputs)
    }
    evaluated = slicing.slice_outputs(trace.jaxpr, fixed)
    # Compiled as a whole: evaluated eagerly, each equation would be a program.
    program = jax.jit(core.jaxpr_as_fun(evaluated.jaxpr)).lower().compile()
    with jax.ensure_compile_time_eval(), jax.debug_nans(False):
        values = evaluated.unflatten(program())
        return [
            identity.from_values([np.asarray(value) for value in values[i]])
            if i in values
            else None
            for i in range(len(stored))
        ]
