"""Quantizes the contractions of NNX models by rules."""

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import jax
from flax import nnx

from aqtlite.flax.nnx import adapter_axes, classes, layers
from aqtlite.flax.nnx.calls import CALL, function_of
from aqtlite.flax.nnx.model import (
    ATTRIBUTE,
    KINDS,
    GradientStatistics,
    Quantization,
    QuantizedLayer,
    QuantizedModel,
    collection_of,
)
from aqtlite.flax.nnx.pure import PureCall
from aqtlite.program import calibration_state
from aqtlite.program.adapters import adapter_init
from aqtlite.program.convert import frozen_by_module, program_of
from aqtlite.program.plan import Plan
from aqtlite.program.rules import rules as rules_lib
from aqtlite.program.serving import guards
from aqtlite.program.serving.placeholder import is_placeholder
from aqtlite.quantization.states.state_collections import ADAPTER

M = TypeVar("M", bound=nnx.Module)


def quantize_model(
    model: M, rules: Any = (), *, strict: bool = False, invariant: bool = False
) -> M:
    """Quantizes the contractions of an NNX model by rules, without changing the model.

    The result shares the model's variables and has the same paths, so checkpoints,
    optimizers, sharding rules and filters of the float model fit it. Its class is a
    subclass of the model's class. ``__call__`` and the other methods are quantized; a
    method without contractions runs unchanged, behind a trace that looks for them. So
    does ``Model.generate(quantized, ...)``, called on the float model's class, without
    one, while calls of the model inside it are quantized. Calls update the variables as
    usual (batch statistics, rngs, caches). A call traces the model: call it inside
    `nnx.jit`. Private methods, and layers that are read from it and called, are
    quantized by the same rules, where these name them. A quantized model inside of
    another keeps its rules, and is planned, calibrated and converted with it.

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
        invariant: as in `aqtlite.quantize_function`.

    Raises:
        TypeError: if `model` is not an NNX module, or `rules` has another type.
        ValueError: if `model` is converted for serving, or has an attribute ``aqt`` of
            its own, or if one in it is invariant and it is not; when the result is
            called, if a required rule matches nothing, if nothing is quantized (unless
            each rule has ``cfg=None``, or matches nothing and is not required), if the
            method changes more than variables, with `strict` if a contraction stays in
            float, and with `invariant` if `aqtlite.invariant` refuses an operation.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"quantize_model takes a flax.nnx.Module, got {type(model).__name__}; "
            "aqtlite.flax.quantize_model takes Linen modules"
        )
    quantization = Quantization(
        rules_lib.check(rules), strict=strict, invariant=invariant
    )
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
    for path, inner in layers.quantized_below(quantized):
        name = "/".join(map(str, path))
        if inner.aqt.invariant and not invariant:
            raise ValueError(
                f"the quantized model {name!r} in it is invariant: quantize the model "
                "with invariant=True, which decides about all of it"
            )
        if not inner.aqt.frozen:
            _adopt(quantization, name, inner.aqt)
    classes.quantize(quantized, quantization)
    return quantized


def _adopt(quantization: Quantization, path: str, inner: Quantization) -> None:
    """Moves the states of a quantized model to a model around it, which uses them.

    Args:
        quantization: that of the outer model.
        path: path of the inner model.
        inner: that of the inner model.
    """
    for attribute, _ in KINDS.values():
        own = getattr(quantization, attribute)
        for name, entry in getattr(inner, attribute).items():
            # The name of a second contraction of the inner model itself is "#1".
            joint = "/" if name and not name.startswith("#") else ""
            own[f"{path}{joint}{name}"] = entry
        setattr(inner, attribute, nnx.data({}))


def as_quantized(model: nnx.Module) -> QuantizedModel:
    """Returns a quantized model; for a float model, with injected functions only.

    Raises:
        TypeError: if `model` is not an NNX module, or a layer of a quantized model.
    """
    if isinstance(model, QuantizedModel):
        return model
    if isinstance(model, QuantizedLayer):
        raise TypeError(
            f"got a {type(model).__name__} of a quantized model: give the model, which "
            "has the rules and states; or the layer quantized by itself, "
            "quantize_model(layer, rules)"
        )
    return cast(QuantizedModel, quantize_model(model))


def plan(
    model: nnx.Module,
    *args: Any,
    method: str = CALL,
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
    model: nnx.Module, *args: Any, method: str = CALL, **kwargs: Any
) -> None:
    """Creates the variables of adapters, and of calibrations that have states.

    Adapters are `nnx.LoRAParam`s, also of a converted model. Existing variables are
    kept. Learned scales start from the values of this call. Adapters with
    ``init="pissa"`` take what they start from out of the kernels. Create optimizers
    afterwards.

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
    # Adapters of a converted model start from the shapes of what is frozen.
    arguments = jax.tree.map(
        lambda x: x.struct if is_placeholder(x) else x,
        call.arguments,
        is_leaf=is_placeholder,
    )
    function = function_of(quantized, call)
    params, *others = arguments
    program = program_of(function, params, tuple(others), {}, {})
    leaves, treedef = jax.tree.flatten(call.arguments, is_leaf=is_placeholder)
    started = adapter_init.start(
        program,
        [leaves[i] for i in program.traced.leaves],
        frozen_by_module(collection_of(quantized)),
        guards.NNX,
    )
    values = started.beside(program.traced.values((arguments, {})))
    state = calibration_state.first(program, values, started.adapters)
    if started.changed and not quantized.aqt.learned:
        for i, x in started.changed.items():
            leaves[program.traced.leaves[i]] = x
        call.replace_params(jax.tree.unflatten(treedef, leaves)[0])
    adapters = [rule.adapter for rule in quantized.aqt.rules if rule.adapter]
    if any(one.dropout for one in adapters) and quantized.aqt.rngs is None:
        quantized.aqt.rngs = nnx.data(nnx.Rngs(dropout=adapters[0].seed))
    metadata: Mapping[str, Any] = {}
    if adapters:
        metadata = adapter_axes.metadata_of_adapters(quantized, call, program)
    for collection, entries in state.items():
        attribute, variable = KINDS[collection]
        before = getattr(quantized.aqt, attribute)
        new = _variables(entries, variable, metadata)
        setattr(quantized.aqt, attribute, nnx.data({**new, **before}))


def _variables(
    entries: dict[str, Any],
    variable: type[nnx.Variable[Any]],
    metadata: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns states as variables of a type, but adapters as `nnx.LoRAParam`s.

    Args:
        entries: the states of contractions, by path.
        variable: the type.
        metadata: metadata of the parameters of adapters, by path and name.
    """

    def of_field(path: str, field: str, state: Any) -> Any:
        if field != ADAPTER:
            return jax.tree.map(variable, state)
        of_each = metadata.get(path, {})
        return {
            name: nnx.LoRAParam(x, **of_each.get(name, {})) for name, x in state.items()
        }

    return {
        path: {field: of_field(path, field, state) for field, state in entry.items()}
        for path, entry in entries.items()
    }


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
