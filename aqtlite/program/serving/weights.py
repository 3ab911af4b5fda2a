"""The weights among a model's operands: chosen, recorded in a trace, and identified.

A weight is an operand that depends only on parameters and constants. Operands that
cannot be frozen are returned with the reason.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from aqtlite.jaxpr import analysis
from aqtlite.program import unsummed
from aqtlite.program.serving.contraction import OperandKey, WeightOutputs
from aqtlite.program.serving.framework import Model
from aqtlite.program.serving.frozen_record import FrozenRecord
from aqtlite.program.serving.model import (
    Buffer,
    Discovery,
    FoundOperand,
    Leaf,
    Parameter,
)
from aqtlite.program.serving.weight import Refusal, Weight


def check_some(discoveries: Sequence[Discovery]) -> None:
    """Raises ValueError if no contraction of any call is quantized."""
    if any(one.operands for one in discoveries):
        return
    count = sum(one.num_contractions for one in discoveries)
    if count:
        raise ValueError(
            f"nothing to freeze: the configs of all {count} contractions that were "
            "traced quantize nothing (cfg=None or config.unquantized()). The model is "
            "a float model, whose trained variables serve as they are"
        )
    raise ValueError(
        "nothing to freeze: the method that was called has no AqtDotGeneral or "
        "AqtEinsum with a config that quantizes, and no contraction that a rule "
        "quantizes (plan says why): convert quantize_model(model, cfg), if the model "
        "is a float model. Weights that rules leave in float, with adapters or "
        "without, need no conversion"
    )


def chosen(
    model: Model, operands: Iterable[FoundOperand]
) -> tuple[frozenset[OperandKey], dict[OperandKey, Refusal]]:
    """Returns the operands to freeze, and why others are not.

    Args:
        model: the model.
        operands: operands of one call of the model.

    Raises:
        ValueError: if `frozen_operands` names one that depends on the inputs.
    """
    by_key: dict[OperandKey, list[FoundOperand]] = {}
    for one in operands:
        by_key.setdefault(one.key, []).append(one)
    refusals = {key: _refusal(found) for key, found in by_key.items()}
    chosen = {key for key, refusal in refusals.items() if refusal is None}
    for key in model.made_of_weights({key: by_key[key] for key in chosen}):
        chosen.discard(key)
        refusals[key] = Refusal("a quantized contraction of weights makes it")
    for key in sorted(chosen):
        is_required = all(one.is_required for one in by_key[key])
        if key.side == "lhs" and key._replace(side="rhs") in chosen and not is_required:
            # The lhs may have been broadcast to the batch of the inputs.
            chosen.discard(key)
            refusals[key] = Refusal("the rhs is a weight, too", is_expected=True)
    return frozenset(chosen), {k: r for k, r in refusals.items() if r is not None}


def _refusal(found: list[FoundOperand]) -> Refusal | None:
    refusals = [refusal for one in found if (refusal := _refusal_of(one)) is not None]
    unexpected = [refusal for refusal in refusals if not refusal.is_expected]
    return next(iter(unexpected + refusals), None)


def _refusal_of(one: FoundOperand) -> Refusal | None:
    shape = one.operand.shape
    raw = one.cfg.fwd
    if one.depends_on_inputs or one.depends_on_buffers:
        if one.is_required and one.obstacle is None:
            raise ValueError(
                f"frozen_operands asks to freeze the {one}, but its value depends on "
                "the model's inputs, on rngs, or on a collection other than 'params'; "
                "use frozen_operands='auto'"
            )
        if one.depends_on_inputs:
            return Refusal("its value depends on the inputs", is_expected=True)
        return Refusal("its value depends on a collection other than 'params'")
    if one.is_product:
        return Refusal(unsummed.SUMS_ONE, is_expected=True)
    if one.frozen_operands != "auto" and not one.is_required:
        return Refusal("frozen_operands says so", is_expected=True)
    if not one.parameters:
        return Refusal("it is a constant", is_expected=True)
    if one.obstacle is not None:
        return Refusal(one.obstacle)
    if raw.smoothing is not None and not raw.smoothing.has_state:
        return Refusal(
            "fwd.smoothing computes its scales from the activations of every call; "
            "take them from statistics: "
            "fwd.smoothing.lhs_calibration=calibration.MaxOverBatches()"
        )
    if math.prod(shape) == 1:
        return Refusal("it is a single number", is_expected=True)
    may_be_batch = set(one.batch_axes)
    if one.operand.side == "lhs":
        may_be_batch = set(range(len(shape))) - set(one.operand.contracting)
    if not one.is_required and any(shape[axis] == 1 for axis in may_be_batch):
        return Refusal("it has an axis of size one, which may be a batch")
    return None


def with_all_moments(
    discoveries: Sequence[Discovery], weights: Sequence[FoundOperand]
) -> list[FoundOperand]:
    """Returns weights with the second moments of all calls that contract them.

    A weight that is rounded at conversion has one rounding for the inputs of all of its
    contractions, whichever call of the model makes them.

    Args:
        discoveries: operands of all calls of the model.
        weights: operands of one call that are weights.
    """
    moments: dict[Any, dict[tuple[str, ...], None]] = {}
    for discovery in discoveries:
        for one in discovery.operands:
            if one.moments and one.obstacle is None:
                moments.setdefault(one.weight, {}).update(dict.fromkeys(one.moments))
    return [
        dataclasses.replace(one, moments=tuple(moments[one.weight]))
        if one.moments
        else one
        for one in weights
    ]


def record_weights(
    model: Model, call: int, weights: Sequence[FoundOperand]
) -> list[Weight]:
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
        made_of = {trace.inputs[i] for i in depends[outputs.original]}
        inputs = {trace.inputs[i] for i in read}
        found, parameters = by_key[stored.key], tuple(_sorted(made_of, Parameter))
        record = FrozenRecord(
            cfg=found.cfg,
            operand=found.operand,
            identity=None,
            made_of=_paths_of(parameters, found.key.path),
            state=found.state,
        )
        result.append(
            Weight(
                index=(call, place),
                trace=trace,
                found=found,
                shape=trace.jaxpr.out_avals[outputs.original].shape,
                parameters=parameters,
                inputs=(*_sorted(inputs, Parameter), *_sorted(inputs, Buffer)),
                made=outputs,
                record=record,
                members=((call, found.key),),
            )
        )
    return result


def _paths_of(
    parameters: Sequence[Parameter], module: tuple[str, ...]
) -> tuple[str, ...]:
    """Returns the paths of parameters, relative to a module, joined by dots.

    The last step always stays: the module path may be that of the parameter itself.
    """
    return tuple(
        ".".join(
            path[min(len(module), len(path) - 1) :]
            if path[: len(module)] == module
            else path
        )
        for path in (parameter.path for parameter in parameters)
    )


def _sorted(inputs: Iterable[Parameter | Buffer], kind: type[Leaf]) -> list[Leaf]:
    """Returns the parameters, or the buffers, in ascending order."""
    return sorted(one for one in inputs if isinstance(one, kind))
