"""The serving conversion of NNX models."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from aqtlite import contraction
from aqtlite.fixed_scale import FixedScale
from aqtlite.flax.nnx.pure import PureCall
from aqtlite.flax.nnx.quantize import (
    ModelFunction,
    QuantizedModel,
    function_of,
    quantize_model,
    state_of,
)
from aqtlite.flax.nnx.variables import Frozen, Statistics
from aqtlite.functions.convert import freeze
from aqtlite.jaxpr import scopes
from aqtlite.serving import report as report_lib
from aqtlite.serving.call_site import COLLECTION, SITE
from aqtlite.serving.report import ConversionReport
from aqtlite.state_collections import STATISTICS


def convert(
    model: nnx.Module,
    *args: Any,
    method: str = "__call__",
    strict: bool = False,
    report: Callable[[ConversionReport], Any] | None = None,
    **kwargs: Any,
) -> QuantizedModel:
    """Freezes the quantized weights of a model into a serving model.

    The call is traced, and the part of the program that makes each weight, an operand
    of a quantized contraction that depends on parameters alone, is run once, and
    nothing else of it. A parameter that nothing else reads is gone: its `nnx.Param` has
    no arrays. Integers and scales are `Frozen` variables in the attribute `frozen`, by
    the path of the module and the name of the parameter. The scales of static ranges
    (`FixedScale`) take the place of the statistics that they come from.

    >>> import jax.numpy as jnp
    >>> from aqtlite import config
    >>> quantized = quantize_model(
    ...     nnx.Linear(32, 4, rngs=nnx.Rngs(0)), config.fully_quantized()
    ... )
    >>> x = jnp.ones((2, 32))
    >>> serving = convert(quantized, x)
    >>> bool((serving(x) == quantized(x)).all())
    True
    >>> serving.frozen[""]["kernel"].get_value()
    QTensor(int8[4,32], scale=float32[4,1], ...)
    >>> import jax
    >>> [x.shape for x in jax.tree.leaves(nnx.state(serving, nnx.Param))]
    [(4,)]

    Args:
        model: what `quantize_model` returned; or a model with functions of
            `aqtlite.flax.nnx` in its layers. Its variables may hold
            `jax.ShapeDtypeStruct`s, as `nnx.eval_shape` makes them; then those of the
            result do.
        *args: those of a call in serving, or their shapes. Other calls are served too
            if they contract the same weights.
        method: the name of the method that is called.
        strict: raises if a weight stays in float, rather than quantize it at every
            call.
        report: is called with a `ConversionReport`; `print` prints it as a table.
        **kwargs: as `args`.

    Returns:
        A model that gives what `model` does, bit for bit, in `nnx.jit`. It shares the
        arrays that are left with `model`, and no variables.

    Raises:
        TypeError: if `model` is no NNX module.
        ValueError: if it is converted already, or if no contraction is quantized; with
            `strict`, if a weight stays in float.
    """
    return convert_in_place(
        nnx.clone(_quantized(model)),
        *args,
        method=method,
        strict=strict,
        report=report,
        **kwargs,
    )


def convert_in_place(
    model: nnx.Module,
    *args: Any,
    method: str = "__call__",
    strict: bool = False,
    report: Callable[[ConversionReport], Any] | None = None,
    **kwargs: Any,
) -> QuantizedModel:
    """Freezes the quantized weights of a model, as `convert` does, and its floats go.

    Nothing of the model is copied. The float parameters are gone from it, and from
    every other module that shares them, such as the one that `quantize_model` was
    given.

    Args:
        model: as `convert` takes it.
        *args: as `convert` takes them.
        method: the name of the method that is called.
        strict: as `convert` takes it. A model that is refused is left as it was.
        report: as `convert` takes it.
        **kwargs: as `args`.

    Returns:
        `model`; or, if it is no `QuantizedModel`, one that holds it.

    Raises:
        TypeError: as `convert`.
        ValueError: as `convert`.
    """
    model = _quantized(model)
    if model.frozen:
        raise ValueError(
            "the model is converted already: convert takes the float model of training"
        )
    call = PureCall(model.model, method, args, kwargs)
    function = function_of(model, call)
    _check_is_quantized(function, call)
    params, *others = call.arguments
    serving, summary = freeze(function, params, tuple(others), {}, state_of(model))
    if strict:
        report_lib.check_all_frozen(summary)
    report_lib.log(summary)
    if report is not None:
        report(summary)
    call.replace_params(serving["params"])
    frozen = {
        module: {name: _variable(entry) for name, entry in entries.items()}
        for module, entries in serving[COLLECTION].items()
    }
    model.frozen = nnx.data(frozen)
    if frozen and model.statistics:
        fixed = serving["state"][STATISTICS]
        model.statistics = nnx.data(
            jax.tree.map(Statistics, fixed, is_leaf=_is_fixed_scale)
        )
    return model


def _check_is_quantized(function: ModelFunction, call: PureCall) -> None:
    """Refuses a call without any contraction whose weight could be frozen.

    Raises:
        ValueError: if it is one.
    """
    traced, planned = function.traced(call.arguments, {})
    if planned.quantized():
        return
    why = "no rule names a contraction, and no layer has an AqtDotGeneral"
    if scopes.occurs(contraction.SCOPE, traced.jaxpr):
        why = (
            "its contractions are quantized by functions whose weights NNX cannot "
            "freeze: inject those of aqtlite.flax.nnx, or name contractions by rules, "
            "in place of aqtlite.flax.AqtDotGeneral or aqtlite.make_dot_general"
        )
    raise ValueError(f"nothing to freeze in the call: {why}")


def _quantized(model: nnx.Module) -> QuantizedModel:
    return model if isinstance(model, QuantizedModel) else quantize_model(model)


def _is_fixed_scale(x: Any) -> bool:
    return isinstance(x, FixedScale)


def _variable(entry: dict[str, Any]) -> Frozen[Any]:
    site = entry[SITE]
    return Frozen(entry[site.operand.side], **{SITE: site})
