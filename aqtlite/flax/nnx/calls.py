"""Calls of quantized NNX models, and of their layers."""

import dataclasses
import functools
from typing import Any

import jax
from absl import logging

from aqtlite.flax.nnx import layers
from aqtlite.flax.nnx.layers import Path
from aqtlite.flax.nnx.model import (
    QuantizedLayer,
    QuantizedModel,
    collection_of,
    float_class_of,
    is_variable,
    state_of,
)
from aqtlite.flax.nnx.pure import PureCall
from aqtlite.invariance import finding
from aqtlite.jaxpr import registry, sites, tracing
from aqtlite.jaxpr.recognition import lookups
from aqtlite.jaxpr.replacement import Replacement
from aqtlite.program import injected
from aqtlite.program.convert import ServingFunction, has_frozen
from aqtlite.program.modules import nnx_methods
from aqtlite.program.naming import by_parameter
from aqtlite.program.planned_lookup import Planned
from aqtlite.program.quantize import QuantizedFunction
from aqtlite.program.serving import guards
from aqtlite.program.serving.frozen_record import COLLECTION
from aqtlite.quantization.states.state_collections import STATISTICS
from aqtlite.quantization.states.statistics import States

CALL = "__call__"


def call_method(
    model: QuantizedModel,
    method: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    path: Path = (),
) -> Any:
    """Calls a method of a model, quantized unless it has no contractions.

    Args:
        model: model in training, or converted.
        method: name of the method.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        path: steps to a layer whose method it is; none for the model's own method.
    """
    call = PureCall(model, method, args, kwargs, path)
    function, state = function_of(model, call), state_of(model)
    try:
        params, *others = call.arguments
        if model.aqt.frozen or has_frozen(params):
            serving = {
                "params": params,
                COLLECTION: collection_of(model),
                "state": state,
            }
            out, changes = ServingFunction(function, guards.NNX)(serving, *others)
        elif injected.is_marking():
            # Inside of another model, whose call is planned as a whole.
            out, changes = function.evaluate_marked(call.arguments)
        elif model.aqt.use_running_average or STATISTICS not in state:
            out, changes = function.evaluate(state, call.arguments, {})
        else:
            (out, changes), after = function.run(state, call.arguments, {})
            set_statistics(model, after[STATISTICS])
    except NothingToQuantize:
        return call.in_float(args, kwargs)
    except _NEEDS_VALUES as error:
        if nnx_methods.is_private(method) and not model.aqt.strict:
            _warn_once(call.name)
            return call.in_float(args, kwargs)
        error.add_note(
            f"{call.name} of a quantized model is traced. To run it as it is, and "
            "quantize the calls of the model's methods in it, call it as "
            f"{call.name}(model, ...) with the class that was quantized."
        )
        raise
    call.update(changes)
    return call.result(out)


@functools.lru_cache(maxsize=4096)
def _warn_once(name: str) -> None:
    logging.warning(
        "%s needs concrete values, and runs as it is: only calls of layers and other "
        "methods in it are quantized",
        name,
    )


def call_layer(
    layer: QuantizedLayer, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls a method of a layer of a model, as `call_method`.

    Raises:
        TypeError: if the layer was not read from its model.
    """
    home = layers.home_of(layer)
    if home is None and injected.is_marking():
        # Within a traced call of its model.
        return getattr(float_class_of(layer), method)(layer, *args, **kwargs)
    if home is None:
        raise TypeError(
            f"a {type(layer).__name__} of a quantized model was called without the "
            "model, which has its rules and states: it was copied, or given to nnx.jit "
            "or another transformation by itself, or the model is gone. Give the model "
            "in its place, and read the layer from it there; or quantize the layer, "
            "aqtlite.flax.nnx.quantize_model(layer, rules)"
        )
    return call_method(home.model, method, args, kwargs, home.path)


def gather(
    model: QuantizedModel, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Calls a method of a model in float, and updates statistics only.

    Args:
        model: model in training.
        method: name of the method.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
    """
    call = PureCall(model, method, args, kwargs)
    function = function_of(model, call)
    after = function.gather(state_of(model), *call.arguments)
    set_statistics(model, after[STATISTICS])


def set_statistics(model: QuantizedModel, statistics: dict[str, Any]) -> None:
    """Replaces the statistics of a model.

    Args:
        model: model in training.
        statistics: those of `state_of`, with other values.
    """
    jax.tree.map(
        lambda variable, x: variable.set_value(x),
        model.aqt.statistics,
        statistics,
        is_leaf=is_variable,
    )


_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""Errors of functions that need concrete values of arrays."""


def _is_own(call: PureCall) -> bool:
    """Whether a call is of the model's ``__call__``."""
    return call.method == CALL and not call.path


class NothingToQuantize(ValueError):
    """Raised if a method has no contractions."""


@dataclasses.dataclass(frozen=True)
class ModelFunction(QuantizedFunction):
    """A call of a model as a quantized function of its parameters and arguments."""

    call: PureCall = dataclasses.field(kw_only=True)

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tracing.Traced:
        """Traces the call.

        Raises:
            NothingToQuantize: if the method, other than the model's ``__call__``, has
                no contractions.
            ValueError: if the call changes more than variables.
        """
        traced = super().trace(args, kwargs)
        is_own = _is_own(self.call)
        if self.invariant and not is_own and finding.find(traced.jaxpr).counts:
            return self.call.checked(traced)
        names = {*registry.OF_PRIMITIVES, *lookups.PRIMITIVES}
        if not any(registry.LOOKUP in (rule.ops or ()) for rule in self.rules):
            names = {*registry.OF_PRIMITIVES}
        if not is_own and not sites.find(traced.jaxpr, names=names).contractions:
            raise NothingToQuantize(f"{self.call.name} contracts nothing")
        return self.call.checked(traced)

    def evaluate_marked(self, args: tuple[Any, ...]) -> Any:
        """Calls the function in float, with its contractions marked by their configs.

        Inside of another model, which quantizes them and keeps their states.

        Args:
            args: arguments of the function.
        """
        program = self.program({}, args, {})
        adapted = [one.path for one in program.plan.replaced() if one.adapter]
        if adapted:
            raise ValueError(
                f"the model has adapters ({adapted[0]!r}) and is inside of another "
                "quantized model, which would leave them out: quantize the outermost "
                "model, by rules for all of it"
            )
        plan = dataclasses.replace(program.plan, forms=None)
        program = dataclasses.replace(program, plan=plan, states_in=lambda *_: States())
        values = program.traced.values((args, {}))
        outputs, _ = program.evaluate(values, _marked)
        return program.traced.result(outputs)


def _marked(one: Planned, states: States) -> Replacement:
    return one.marked(states)


def function_of(model: QuantizedModel, call: PureCall) -> ModelFunction:
    """Returns a call of a model as a quantized function."""
    rules = model.aqt.rules
    is_part = call.path or nnx_methods.is_private(call.method)
    if is_part or (model.aqt.invariant and not _is_own(call)):
        # Rules may be for other layers, or methods.
        rules = tuple(dataclasses.replace(one, is_required=False) for one in rules)
    return ModelFunction(
        call.function,
        rules,
        params=0,
        strict=model.aqt.strict,
        invariant=model.aqt.invariant,
        naming=by_parameter,
        call=call,
    )
