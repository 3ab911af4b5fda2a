"""NNX models whose contractions are quantized by rules."""

import dataclasses
import functools
import types
from typing import Any, TypeVar, cast

import jax
from flax import nnx

from aqtlite.flax.nnx.model import (
    ATTRIBUTE,
    KINDS,
    Quantization,
    QuantizedModel,
    collection_of,
    float_class_of,
    is_variable,
    set_class,
    state_of,
)
from aqtlite.flax.nnx.pure import PureCall
from aqtlite.flax.nnx.variables import GradientStatistics
from aqtlite.jaxpr import sites, tracing
from aqtlite.program import rules as rules_lib
from aqtlite.program.convert import ServingFunction
from aqtlite.program.freezing import has_frozen
from aqtlite.program.naming import by_parameter
from aqtlite.program.plan import Plan
from aqtlite.program.quantize import QuantizedFunction
from aqtlite.program.serving import guards
from aqtlite.program.serving.frozen_record import COLLECTION
from aqtlite.quantization.state_collections import STATISTICS

M = TypeVar("M", bound=nnx.Module)

_CALL = "__call__"


def quantize_model(model: M, rules: Any = (), *, strict: bool = False) -> M:
    """Quantizes the contractions of an NNX model by rules, nothing of it touched.

    The result is a model of the same paths, of a subclass of the model's class, that
    shares its variables: checkpoints, optimizers, sharding rules and filters of the
    float model are those of the quantized one. Its ``__call__`` and its other public
    methods compute quantized; a method that contracts nothing runs as it is, and so
    does ``Model.generate(quantized, ...)``, a method of the class that was quantized,
    in which calls of the model are quantized. What calls change (batch statistics,
    rngs, caches) is changed in the variables. A call traces the model: call it inside
    of `nnx.jit`. Submodules are those of the float model, and compute in float if they
    are called by themselves.

    NNX leaves no name scopes. The path of a contraction, which rules name, is that of
    the module that holds the parameter of its weight (``layers/0/attention/query``),
    then the name scopes that are there. A contraction of activations has the path of
    the innermost module around the weights contracted before and behind it, so that
    those of attention have ``layers/0/attention``. Functions of
    `aqtlite.flax.nnx` that are injected into layers keep their configs.

    Rules and states are in the attribute ``aqt``. Statistics of calibrations are
    gathered in every call where ``model.aqt.use_running_average`` is False, which
    ``model.train()`` and ``model.eval()`` set as they do for `nnx.BatchNorm`.

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
        model: any module. One that is quantized already gets these rules in place of
            its own, and no states.
        rules: a sequence of `aqtlite.Rule`, the first that fits decides; or a config,
            for every contraction; none for what is injected alone. Contractions that
            none of them names stay in float.
        strict: calls raise if a contraction of floats stays in float though no rule
            says so.

    Raises:
        TypeError: if `model` is no NNX module, or `rules` are none.
        ValueError: if `model` is converted for serving, or has an attribute ``aqt`` of
            its own; when it is called, if a rule matches nothing, if nothing is
            quantized (unless each rule has ``cfg=None``), if the method changes more of
            the model than variables, and with `strict` if a contraction stays in float.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"quantize_model takes a flax.nnx.Module, got {type(model).__name__}"
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
    """Returns a model that is quantized by rules, or by what is injected alone.

    Raises:
        TypeError: if `model` is no NNX module.
    """
    if isinstance(model, QuantizedModel):
        return model
    return cast(QuantizedModel, quantize_model(model))


def plan(model: nnx.Module, *args: Any, method: str = _CALL, **kwargs: Any) -> Plan:
    """Decides about every contraction of a call, and runs nothing.

    Args:
        model: what `quantize_model` returned; or a model with functions of
            `aqtlite.flax.nnx` in its layers.
        *args: those of the call; `jax.ShapeDtypeStruct`s may stand for arrays.
        method: the name of the method that is called.
        **kwargs: as `args`.
    """
    quantized = as_quantized(model)
    call = PureCall(quantized, method, args, kwargs)
    return function_of(quantized, call).plan(*call.arguments)


def init_state(
    model: nnx.Module, *args: Any, method: str = _CALL, **kwargs: Any
) -> None:
    """Makes the variables of calibrations that gather statistics or are learned.

    Those that are there are left as they are. Learned scales start from the values of
    this call. Optimizers are made after it.

    Args:
        model: what `quantize_model` returned.
        *args: those of a call.
        method: the name of the method that is called.
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
    """Returns a model that is quantized.

    Raises:
        TypeError: if it is not.
    """
    if not isinstance(model, QuantizedModel):
        raise TypeError(
            f"{function} takes what aqtlite.flax.nnx.quantize_model returned, got "
            f"{type(model).__name__}"
        )
    return model


def overwrite_with_gradient(model: QuantizedModel, grads: Any) -> Any:
    """Puts new statistics of output gradients into a model.

    Args:
        model: that was differentiated.
        grads: the gradient with respect to ``nnx.Any(nnx.Param, GradientStatistics)``:
            of these statistics, it is what takes their place.

    Returns:
        The gradient of the parameters, for the optimizer.
    """
    params, statistics = nnx.split_state(grads, nnx.Param, GradientStatistics)
    nnx.update(model, statistics)
    return params


def call_method(
    model: QuantizedModel, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls a method of a model, quantized; as it is, if it contracts nothing.

    Args:
        model: in training, or converted.
        method: the name of the method.
        args: those of the call.
        kwargs: the same.
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
            _set_statistics(model, after)
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
    """Calls a method of a model in float, and changes statistics alone.

    Args:
        model: in training.
        method: the name of the method.
        args: those of the call.
        kwargs: the same.
    """
    call = PureCall(model, method, args, kwargs)
    function = function_of(model, call)
    _set_statistics(model, function.gather(state_of(model), *call.arguments))


def _set_statistics(model: QuantizedModel, state: dict[str, Any]) -> None:
    jax.tree.map(
        lambda variable, x: variable.set_value(x),
        model.aqt.statistics,
        state[STATISTICS],
        is_leaf=is_variable,
    )


_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""Errors of functions that need the values of arrays while they are traced."""


class NothingToQuantize(ValueError):
    """A method contracts nothing."""


@dataclasses.dataclass(frozen=True)
class ModelFunction(QuantizedFunction):
    """A call of a model as a quantized function, its parameters first."""

    call: PureCall = dataclasses.field(kw_only=True)

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tracing.Traced:
        """Traces the call.

        Raises:
            NothingToQuantize: if it is not that of the model, and contracts nothing.
            ValueError: if it changes more than variables.
        """
        traced = super().trace(args, kwargs)
        name = self.call.method
        if name != _CALL and not sites.find(traced.jaxpr).contractions:
            raise NothingToQuantize(f"the method {name!r} contracts nothing")
        return self.call.checked(traced)


def function_of(model: QuantizedModel, call: PureCall) -> ModelFunction:
    """A call of a model as a quantized function."""
    return ModelFunction(
        call.function,
        model.aqt.rules,
        params=0,
        strict=model.aqt.strict,
        naming=by_parameter,
        call=call,
    )


def _class_of(model: nnx.Module) -> type[nnx.Module]:
    """The class of a model when it is quantized."""
    # Classes that are no pytrees (`pytree=False`) are leaves.
    return _subclass(float_class_of(model), not jax.tree_util.all_leaves([model]))


@functools.cache
def _subclass(base: type[nnx.Module], is_pytree: bool) -> type[nnx.Module]:
    """The class of quantized models of a class; always one and the same."""

    def fill(namespace: dict[str, Any]) -> None:
        namespace.update({name: _method(base, name) for name in _names(base)})
        namespace["_float_class"] = base
        namespace["__reduce__"] = lambda self: (_empty, (base, is_pytree), vars(self))
        for name in ("__module__", "__qualname__", "__doc__"):
            namespace[name] = getattr(base, name)

    # A class that keeps a register of its subclasses by name keeps the model's own.
    name, bases = f"Quantized{base.__name__}", (base, QuantizedModel)
    made = types.new_class(name, bases, {"pytree": is_pytree}, fill)
    made.__name__ = base.__name__
    return cast(type[nnx.Module], made)


def _empty(base: type[nnx.Module], is_pytree: bool) -> nnx.Module:
    """A quantized model without attributes, for pickle."""
    cls = _subclass(base, is_pytree)
    return cls.__new__(cls)


def _names(base: type[nnx.Module]) -> list[str]:
    """The names of the methods of a class that are quantized."""
    public = [name for name in dir(base) if not name.startswith("_")]
    # `set_view` is how nnx.view sets attributes.
    own = [n for n in public if not hasattr(nnx.Module, n) and n != "set_view"]
    return [name for name in (*own, _CALL) if _is_method(_attribute(base, name))]


def _attribute(cls: type, name: str) -> Any:
    """What a class has under a name, and not its metaclass."""
    return next((vars(c)[name] for c in cls.__mro__ if name in vars(c)), None)


def _is_method(x: Any) -> bool:
    if isinstance(x, staticmethod | classmethod | type):
        return False
    # nnx.jit and others make callable objects that bind as functions do.
    return isinstance(x, functools.partialmethod) or (
        callable(x) and hasattr(type(x), "__get__")
    )


def _method(base: type[nnx.Module], name: str) -> Any:
    """A method, quantized."""

    @functools.wraps(getattr(base, name))
    def run(self: QuantizedModel, *args: Any, **kwargs: Any) -> Any:
        return call_method(self, name, args, kwargs)

    return run
