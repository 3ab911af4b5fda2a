"""Quantizes the contractions of NNX models by rules."""

import dataclasses
import functools
import types
from typing import Any, TypeVar, cast

import jax
from flax import nnx

from aqtlite.flax.nnx import methods
from aqtlite.flax.nnx.model import (
    ATTRIBUTE,
    KINDS,
    GradientStatistics,
    Quantization,
    QuantizedModel,
    collection_of,
    float_class_of,
    is_variable,
    set_class,
    state_of,
)
from aqtlite.flax.nnx.pure import PureCall
from aqtlite.jaxpr import sites, tracing
from aqtlite.program import rules as rules_lib
from aqtlite.program.convert import ServingFunction, has_frozen
from aqtlite.program.naming import by_parameter
from aqtlite.program.plan import Plan
from aqtlite.program.quantize import QuantizedFunction
from aqtlite.program.serving import guards
from aqtlite.program.serving.frozen_record import COLLECTION
from aqtlite.quantization.state_collections import STATISTICS

M = TypeVar("M", bound=nnx.Module)

_CALL = "__call__"


def quantize_model(model: M, rules: Any = (), *, strict: bool = False) -> M:
    """Quantizes the contractions of an NNX model by rules, without changing the model.

    The result shares the model's variables and has the same paths, so checkpoints,
    optimizers, sharding rules and filters of the float model fit it. Its class is a
    subclass of the model's class. ``__call__`` and the other public methods are
    quantized; a method without contractions runs unchanged. So does
    ``Model.generate(quantized, ...)``, called on the float model's class, while calls
    of the model inside it are quantized. Calls update the variables as usual (batch
    statistics, rngs, caches). A call traces the model: call it inside `nnx.jit`.
    Submodules are those of the float model, and compute in float if called directly.

    The path of a contraction, for rules, is that of the module with the parameter of
    its weight (``layers/0/attention/query``), or, for a contraction of activations, of
    the module whose method contracts, itself or by a function that it calls
    (``layers/0/attention``); followed by the name scopes inside of the module.
    Functions of `aqtlite.flax.nnx` that are injected into layers keep their configs.

    Rules and states are in the attribute ``aqt``. Calls gather the statistics of
    calibrations while ``model.aqt.use_running_average`` is False; ``model.train()`` and
    ``model.eval()`` set it, as for `nnx.BatchNorm`.

    >>> import jax.numpy as jnp
    >>> from aqtlite import Rule, config
    >>> class Mlp(nnx.Module):
    ...     def __init__(self, rngs):
    ...         self.up = nnx.Linear(4, 8, rngs=rngs)
    ...         self.down = nnx.Linear(8, 4, rngs=rngs)
    ...     def __call__(self, x):
    ...         return self.down(nnx.relu(self.up(x)))
    >>> model = quantize_model(
    ...     Mlp(nnx.Rngs(0)), [Rule(cfg=config.fully_quantized())]
    ... )
    >>> isinstance(model, Mlp), model.up.kernel.shape
    (True, (4, 8))
    >>> [one.path for one in plan(model, jnp.ones((2, 4))).quantized()]
    ['up', 'down']
    >>> model(jnp.ones((2, 4))).shape
    (2, 4)

    Args:
        model: any module. For a quantized model, the result has these rules instead of
            the model's, and none of its states.
        rules: sequence of `aqtlite.Rule`, of which the first match decides; or a config
            for every contraction. Contractions without a match stay in float. Empty:
            only injected functions quantize.
        strict: whether calls raise if a contraction of floats stays in float without a
            rule that says so.

    Raises:
        TypeError: if `model` is not an NNX module, or `rules` has another type.
        ValueError: if `model` is converted for serving, or has an attribute ``aqt`` of
            its own; when the result is called, if a required rule matches nothing, if
            nothing is quantized (unless each rule has ``cfg=None``), if the method
            changes more than variables, and with `strict` if a contraction stays in
            float.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"quantize_model takes a flax.nnx.Module, got {type(model).__name__}; "
            "aqtlite.flax.quantize_model takes Linen modules"
        )
    quantization = Quantization(rules_lib.check(rules), strict=strict)
    if isinstance(model, QuantizedModel):
        if model.aqt.frozen:
            raise ValueError(
                "the model is converted already: quantize_model takes a float model, "
                "or one in training"
            )
    elif hasattr(model, ATTRIBUTE):
        raise ValueError(
            f"{type(model).__name__} has an attribute {ATTRIBUTE!r}, which is where a "
            "quantized model has its rules and states: rename it"
        )
    quantized = nnx.clone(model, variables=False)
    set_class(quantized, _class_of(model))
    setattr(quantized, ATTRIBUTE, quantization)
    return quantized


def as_quantized(model: nnx.Module) -> QuantizedModel:
    """Returns a quantized model; for a float model, with injected functions only.

    Raises:
        TypeError: if `model` is not an NNX module.
    """
    if isinstance(model, QuantizedModel):
        return model
    return cast(QuantizedModel, quantize_model(model))


def plan(
    model: nnx.Module,
    *args: Any,
    method: str = _CALL,
    platform: str | None = None,
    **kwargs: Any,
) -> Plan:
    """Returns the decision about every contraction of a call, without running it.

    Args:
        model: result of `quantize_model`, or a model with functions of
            `aqtlite.flax.nnx` in its layers.
        *args: arguments of the call, or `jax.ShapeDtypeStruct`s for arrays.
        method: name of the method to call.
        platform: as in `aqtlite.plan`.
        **kwargs: as `args`.
    """
    quantized = as_quantized(model)
    call = PureCall(quantized, method, args, kwargs)
    return function_of(quantized, call).plan(*call.arguments, platform=platform)


def init_state(
    model: nnx.Module, *args: Any, method: str = _CALL, **kwargs: Any
) -> None:
    """Creates the variables of calibrations that gather statistics or are learned.

    Existing ones are kept. Learned scales start from the values of this call. Create
    optimizers afterwards.

    Args:
        model: result of `quantize_model`.
        *args: arguments of a call.
        method: name of the method to call.
        **kwargs: as `args`.

    Raises:
        TypeError: if `model` is not quantized.
    """
    quantized = check_quantized(model, "init_state")
    call = PureCall(quantized, method, args, kwargs)
    state = function_of(quantized, call).init_state(*call.arguments)
    for collection, entries in state.items():
        attribute, variable = KINDS[collection]
        before = getattr(quantized.aqt, attribute)
        new = jax.tree.map(variable, entries)
        setattr(quantized.aqt, attribute, nnx.data({**new, **before}))


def check_quantized(model: nnx.Module, function: str) -> QuantizedModel:
    """Returns a model after checking that it is quantized.

    Raises:
        TypeError: if it is not.
    """
    if not isinstance(model, QuantizedModel):
        raise TypeError(
            f"{function} takes what aqtlite.flax.nnx.quantize_model returned, got "
            f"{type(model).__name__}: quantize it by rules, or without any, "
            "quantize_model(model, ()), if its layers were given dot_general=..."
        )
    return model


def overwrite_with_gradient(model: QuantizedModel, grads: Any) -> Any:
    """Replaces a model's statistics of output gradients by their gradient.

    Args:
        model: the differentiated model.
        grads: gradient with respect to ``nnx.Any(nnx.Param, GradientStatistics)``. The
            gradient of the statistics is their new value.

    Returns:
        The gradient of the parameters, for the optimizer.
    """
    params, statistics = nnx.split_state(grads, nnx.Param, GradientStatistics)
    nnx.update(model, statistics)
    return params


def call_method(
    model: QuantizedModel, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls a method of a model, quantized unless it has no contractions.

    Args:
        model: model in training, or converted.
        method: name of the method.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
    """
    call = PureCall(model, method, args, kwargs)
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
        elif model.aqt.use_running_average or STATISTICS not in state:
            out, changes = function.evaluate(state, call.arguments, {})
        else:
            (out, changes), after = function.run(state, call.arguments, {})
            set_statistics(model, after[STATISTICS])
    except NothingToQuantize:
        return getattr(float_class_of(model), method)(model, *args, **kwargs)
    except _NEEDS_VALUES as error:
        name = f"{type(model).__name__}.{method}"
        error.add_note(
            f"{name} of a quantized model is traced. To run it as it is, and quantize "
            f"the calls of the model's methods in it, call it as {name}(model, ...) "
            "with the class that was quantized."
        )
        raise
    call.update(changes)
    return call.result(out)


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


class NothingToQuantize(ValueError):
    """Raised if a method has no contractions."""


@dataclasses.dataclass(frozen=True)
class ModelFunction(QuantizedFunction):
    """A call of a model as a quantized function of its parameters and arguments."""

    call: PureCall = dataclasses.field(kw_only=True)

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tracing.Traced:
        """Traces the call.

        Raises:
            NothingToQuantize: if the method, other than ``__call__``, has no
                contractions.
            ValueError: if the call changes more than variables.
        """
        traced = super().trace(args, kwargs)
        name = self.call.method
        if name != _CALL and not sites.find(traced.jaxpr).contractions:
            raise NothingToQuantize(f"the method {name!r} contracts nothing")
        return self.call.checked(traced)


def function_of(model: QuantizedModel, call: PureCall) -> ModelFunction:
    """Returns a call of a model as a quantized function."""
    return ModelFunction(
        call.function,
        model.aqt.rules,
        params=0,
        strict=model.aqt.strict,
        naming=by_parameter,
        call=call,
    )


def _class_of(model: nnx.Module) -> type[nnx.Module]:
    """Returns the class of a model once it is quantized."""
    # A module of a class with `pytree=False` is a leaf.
    return _subclass(float_class_of(model), not jax.tree_util.all_leaves([model]))


@functools.cache
def _subclass(base: type[nnx.Module], is_pytree: bool) -> type[nnx.Module]:
    """Returns the one subclass for quantized models of a class."""

    def fill(namespace: dict[str, Any]) -> None:
        namespace.update({name: _method(base, name) for name in methods.names_of(base)})
        namespace["_float_class"] = base
        namespace["__reduce__"] = lambda self: (_empty, (base, is_pytree), vars(self))
        for name in ("__module__", "__qualname__", "__doc__"):
            namespace[name] = getattr(base, name)

    # The temporary name keeps registries of subclasses by name from overwriting `base`.
    name, bases = f"Quantized{base.__name__}", (base, QuantizedModel)
    made = types.new_class(name, bases, {"pytree": is_pytree}, fill)
    made.__name__ = base.__name__
    return cast(type[nnx.Module], made)


def _empty(base: type[nnx.Module], is_pytree: bool) -> nnx.Module:
    """Returns a quantized model without attributes, for pickle."""
    cls = _subclass(base, is_pytree)
    return cls.__new__(cls)


def _method(base: type[nnx.Module], name: str) -> Any:
    """Returns the quantized version of a method."""

    @functools.wraps(getattr(base, name))
    def run(self: QuantizedModel, *args: Any, **kwargs: Any) -> Any:
        return call_method(self, name, args, kwargs)

    return run
