"""NNX models whose contractions are quantized by rules."""

import dataclasses
import inspect
from typing import Any

import jax
from flax import nnx

from aqtlite.flax.nnx.pure import PureCall
from aqtlite.flax.nnx.variables import Frozen, GradientStatistics, Statistics
from aqtlite.functions import rules as rules_lib
from aqtlite.functions.convert import ServingFunction
from aqtlite.functions.naming import by_parameter
from aqtlite.functions.plan import Plan
from aqtlite.functions.quantize import QuantizedFunction
from aqtlite.functions.rules import Rule
from aqtlite.jaxpr import tracing
from aqtlite.serving.call_site import COLLECTION, SITE
from aqtlite.state_collections import OF_GRADIENTS, PARAMETERS, STATISTICS

_KINDS: dict[str, tuple[str, type[nnx.Variable[Any]]]] = {
    STATISTICS: ("statistics", Statistics),
    PARAMETERS: ("learned", nnx.Param),
    OF_GRADIENTS: ("gradient_statistics", GradientStatistics),
}
"""For each collection of states, the attribute that has it, and its variables."""

ATTRIBUTES = {collection: attribute for collection, (attribute, _) in _KINDS.items()}
"""For each collection of states, the attribute that has it."""


class QuantizedModel(nnx.Module):
    """An NNX model whose contractions are quantized; see `quantize_model`.

    It is called as the model is, and has its methods. Attributes of the model are those
    of ``quantized.model``, which shares its variables and computes in float.
    """

    def __init__(self, model: nnx.Module, rules: tuple[Rule, ...], *, strict: bool):
        self.model = model
        self.rules = nnx.static(rules)
        self.strict = strict
        self.use_running_average = False
        self.statistics: dict[str, Any] = nnx.data({})
        self.learned: dict[str, Any] = nnx.data({})
        self.gradient_statistics: dict[str, Any] = nnx.data({})
        self.frozen: dict[str, dict[str, Frozen[Any]]] = nnx.data({})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model, quantized."""
        return call_method(self, "__call__", args, kwargs)

    def __getattr__(self, name: str) -> Any:
        # Called for what is missing. `set_view` is how nnx.view calls modules.
        model = vars(self).get("model")
        if _is_method(model, name):
            return lambda *args, **kwargs: call_method(self, name, args, kwargs)
        what = f"{type(self).__name__!r} object has no attribute {name!r}"
        if hasattr(model, name):
            what += f": that of the model, which computes in float, is model.{name}"
        raise AttributeError(what)

    def plan(self, *args: Any, method: str = "__call__", **kwargs: Any) -> Plan:
        """Decides about every contraction of a call, and runs nothing.

        Args:
            *args: those of the call; `jax.ShapeDtypeStruct`s may stand for arrays.
            method: the name of the method that is called.
            **kwargs: as `args`.
        """
        call = PureCall(self.model, method, args, kwargs)
        return function_of(self, call).plan(*call.arguments)

    def init_state(self, *args: Any, method: str = "__call__", **kwargs: Any) -> None:
        """Makes the variables of calibrations that gather statistics or are learned.

        Those that are there are left as they are. Learned scales start from the values
        of this call. Optimizers are made after it.

        Args:
            *args: those of a call.
            method: the name of the method that is called.
            **kwargs: as `args`.
        """
        call = PureCall(self.model, method, args, kwargs)
        state = function_of(self, call).init_state(*call.arguments)
        for collection, entries in state.items():
            attribute, variable = _KINDS[collection]
            before = getattr(self, attribute)
            new = jax.tree.map(variable, entries)
            setattr(self, attribute, nnx.data({**new, **before}))


def call_method(
    model: QuantizedModel, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls a method of a model, quantized.

    Args:
        model: in training, or converted.
        method: the name of the method.
        args: those of the call.
        kwargs: the same.
    """
    call = PureCall(model.model, method, args, kwargs)
    function, state = function_of(model, call), state_of(model)
    if model.frozen:
        params, *others = call.arguments
        serving = {"params": params, COLLECTION: _collection(model), "state": state}
        out, changes = ServingFunction(function)(serving, *others)
    elif model.use_running_average or STATISTICS not in state:
        out, changes = function.evaluate(state, call.arguments, {})
    else:
        (out, changes), after = function.run(state, call.arguments, {})
        jax.tree.map(
            lambda variable, x: variable.set_value(x),
            model.statistics,
            after[STATISTICS],
            is_leaf=_is_variable,
        )
    call.update(changes)
    return out


def _is_method(model: Any, name: str) -> bool:
    """Tells whether an attribute of a model is a method to quantize."""
    found = inspect.getattr_static(type(model), name, None)
    # nnx.view asks every module for set_view, which sets attributes.
    is_internal = name.startswith("_") or name == "set_view"
    return inspect.isfunction(found) and not is_internal


def quantize_model(
    model: nnx.Module, rules: Any = (), *, strict: bool = False
) -> QuantizedModel:
    """Quantizes the contractions of an NNX model by rules, nothing of it touched.

    The result is a module that holds the model, shares its variables, and is called as
    it is: `nnx.split`, `nnx.jit`, `nnx.grad`, `nnx.vmap`, optimizers and everything
    else take it. What calls change (batch statistics, rngs, caches) is changed in the
    model. It traces the model at every call: call it inside of `nnx.jit`.

    NNX leaves no name scopes. The path of a contraction, which rules name, is that of
    the module that holds the parameter of its weight (``layers/0/attention/query``),
    then the name scopes that are there. A contraction of activations has the path of
    the innermost module around the weights contracted before and behind it, so that
    those of attention have ``layers/0/attention``. Functions of
    `aqtlite.flax.nnx` that are injected into layers keep their configs.

    Statistics of calibrations are gathered in every call where the attribute
    `use_running_average` is False, which `quantized.train()` and `quantized.eval()` set
    as they do for `nnx.BatchNorm`.

    >>> import jax.numpy as jnp
    >>> from aqtlite import Rule, config
    >>> class Mlp(nnx.Module):
    ...     def __init__(self, rngs):
    ...         self.up = nnx.Linear(4, 8, rngs=rngs)
    ...         self.down = nnx.Linear(8, 4, rngs=rngs)
    ...     def __call__(self, x):
    ...         return self.down(nnx.relu(self.up(x)))
    >>> model = Mlp(nnx.Rngs(0))
    >>> quantized = quantize_model(model, [Rule(cfg=config.fully_quantized())])
    >>> [one.path for one in quantized.plan(jnp.ones((2, 4))).quantized()]
    ['up', 'down']
    >>> quantized(jnp.ones((2, 4))).shape
    (2, 4)

    Args:
        model: any module.
        rules: a sequence of `aqtlite.Rule`, the first that fits decides; or a config,
            for every contraction; none for what is injected alone. Contractions that
            none of them names stay in float.
        strict: calls raise if a contraction of floats stays in float though no rule
            says so.

    Raises:
        TypeError: if `model` is no NNX module, or `rules` are none.
        ValueError: when it is called, if a rule matches nothing, if nothing is
            quantized (unless each rule has ``cfg=None``), if the method changes more of
            the model than variables, and with `strict` if a contraction stays in float.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"quantize_model takes a flax.nnx.Module, got {type(model).__name__}"
        )
    return QuantizedModel(model, rules_lib.check(rules), strict=strict)


def as_quantized(model: nnx.Module) -> QuantizedModel:
    """Returns a model that is quantized by rules, or by what is injected alone.

    Raises:
        TypeError: if `model` is no NNX module.
    """
    return model if isinstance(model, QuantizedModel) else quantize_model(model)


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


@dataclasses.dataclass(frozen=True)
class ModelFunction(QuantizedFunction):
    """A call of a model as a quantized function, its parameters first."""

    call: PureCall = dataclasses.field(kw_only=True)

    def traced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tracing.Traced, Plan]:
        """Traces the call, and decides about every contraction."""
        traced, planned = super().traced(args, kwargs)
        return self.call.without_unchanged(traced), planned


def function_of(model: QuantizedModel, call: PureCall) -> ModelFunction:
    """A call of a model as a quantized function."""
    return ModelFunction(
        call.function,
        model.rules,
        params=0,
        strict=model.strict,
        naming=by_parameter,
        call=call,
    )


def state_of(model: QuantizedModel) -> dict[str, Any]:
    """The states of a model's calibrations, as its function takes them."""
    return {
        collection: jax.tree.map(
            lambda variable: variable.get_value(), variables, is_leaf=_is_variable
        )
        for collection, (attribute, _) in _KINDS.items()
        if (variables := getattr(model, attribute))
    }


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _collection(model: QuantizedModel) -> dict[str, Any]:
    """The frozen weights of a model, as its function takes them."""
    return {
        module: {name: _entry(variable) for name, variable in entries.items()}
        for module, entries in model.frozen.items()
    }


def _entry(variable: Frozen[Any]) -> dict[str, Any]:
    site = variable.get_metadata(SITE)
    return {SITE: site, site.operand.side: variable.get_value()}
