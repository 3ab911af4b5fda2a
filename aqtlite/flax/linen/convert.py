"""Serving conversion of Linen models: freezes float parameters to integers."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from aqtlite import errors
from aqtlite.flax.call import Call, calls_of
from aqtlite.flax.linen import given_variables
from aqtlite.flax.linen.quantize_model import Model, QuantizedModel, check_model
from aqtlite.flax.linen.tracing import LinenModel
from aqtlite.program.serving import conversion, planning, statistics_uses
from aqtlite.program.serving.frozen_record import COLLECTION
from aqtlite.program.serving.planning import Plan
from aqtlite.program.serving.report import ConversionReport
from aqtlite.quantization.states.state_collections import STATISTICS


def convert(
    model: Model,
    variables: Mapping[str, Any],
    *args: Any,
    calls: Sequence[Call] | None = None,
    strict: bool = False,
    report: Callable[[ConversionReport], Any] | None = None,
    packed: str | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Freezes the quantized weights of a trained model into its variables.

    The model's calls are traced. An operand of a quantized contraction is a *weight* if
    it depends only on parameters and constants: not on `args` and `kwargs`, on other
    collections, or on rngs. This is decided from the traced program, so a transposed,
    cast, stacked or otherwise transformed parameter is a weight, too;
    ``AqtDotGeneral(frozen_operands=...)`` overrides it. Only the part of the program
    that computes the weights is run, and no inference.

    In serving, a contraction finds its frozen weight by the parameters behind its
    operand, not by the order of calls. An operand made of frozen parameters as in no
    converted call raises, or gives NaN under `jax.jit`.

    Args:
        model: a Linen module with `AqtDotGeneral` or `AqtEinsum` inside, or the result
            of `quantize_model`.
        variables: its trained variables, or their shapes (`jax.ShapeDtypeStruct`). A
            parameter may be a `QTensor` (`aqtlite.checkpoint.fill`), whose integers are
            kept where the config has its grid and blocks and the model only moves it;
            else it is decoded and rounded again.
        *args: the arguments of ``model.apply(variables, *args, **kwargs)`` in serving;
            arrays may be given as shapes.
        calls: in place of `args` and `kwargs`, several calls to serve, such as prefill
            and decode: ``calls=[Call(x, memory), Call(x)]``. The weights of all calls
            are frozen, and a parameter is removed if none of them reads it.
        strict: raise if a weight cannot be frozen and would be quantized at every call.
        report: function to call with the `ConversionReport`: the frozen parameters, the
            parameters that stay in float, and why. ``report=print`` prints a table.
        packed: "cpu" packs int4 and int8 weights as the kernel of the extra ``cpu``
            reads them, so that `jax.jit` need not lay them out at every call. Other
            platforms, and CPUs without the kernel, unpack them at every call; results
            are the same. None stores them as they are; other names raise ValueError.
        **kwargs: as `args`; includes `method`, `rngs` and `mutable` of `apply`.

    Returns:
        The serving variables, for ``model.apply(serving, x)`` with the same model.
        They are `variables` with

        - a collection "aqt" with integers and scales, under the path of the contracting
          module and the name of the parameter; absent if nothing could be frozen;
        - a `FrozenKernel` (see `aqtlite.is_frozen`) in place of each parameter
          that nothing else reads;
        - fixed scales of static ranges (`FixedScale`) in "aqt_stats", in place of the
          statistics they were computed from; gather all statistics before. Statistics
          by which weights were rounded (`config.Gptq`) are left out.

        Partitioning metadata carries over to the integers and, with None for the axes
        that share a scale, to the scales.

    Raises:
        TypeError: if the model does not take `args` and `kwargs`.
        ValueError: if the variables are converted already or lack "params", if the
            model has no quantized contraction, if statistics have seen no batch, or if
            `frozen_operands` names an operand that depends on the inputs; with
            `strict`, if a weight stays in float.

    >>> import flax.linen as nn
    >>> import jax.numpy as jnp
    >>> from aqtlite import config
    >>> from aqtlite.flax import AqtDotGeneral
    >>> dense = nn.Dense(4, dot_general=AqtDotGeneral(config.fully_quantized()))
    >>> x = jnp.ones((2, 3))
    >>> variables = dense.init(jax.random.key(0), x)
    >>> serving = convert(dense, variables, x)
    >>> serving["aqt"]["kernel"]["rhs"].qvalue.dtype
    dtype('int8')
    >>> bool((dense.apply(serving, x) == dense.apply(variables, x)).all())
    True
    """
    calls = calls_of(calls, args, kwargs)
    check_model(model, "convert")
    if report is not None and not callable(report):
        raise TypeError(
            "report must be a function that takes a ConversionReport, such as "
            f"report=print, got {errors.brief(report)}"
        )
    for call in calls:
        _check_arguments(model, call)
    planned = plan(model, variables, calls)
    serving = conversion.convert(planned, strict=strict, report=report, packed=packed)
    fixed: dict[str, Any] = planned.model.fix_scales(serving)
    return fixed


def plan(
    model: Model,
    variables: Mapping[str, Any],
    calls: Sequence[Call],
) -> Plan:
    """Plans a conversion from traces alone.

    Args:
        model: as in `convert`.
        variables: its float variables, or their shapes.
        calls: calls to serve.

    Raises:
        ValueError: as in `convert`.
    """
    variables = _check_variables(variables)
    return planning.plan(LinenModel(model, variables, calls))


_OF_APPLY = ("rngs", "method", "mutable", "capture_intermediates")
"""Arguments of `apply` that it does not pass to the method."""


def _check_arguments(model: Model, call: Call) -> None:
    """Checks that the method of a call takes its arguments.

    Raises:
        TypeError: if it does not.
    """
    method = call.kwargs.get("method") or "__call__"
    module = model.model if isinstance(model, QuantizedModel) else model
    if isinstance(method, str):
        method = getattr(type(module), method, None)
    if not inspect.isfunction(method):
        return
    kwargs = {k: v for k, v in call.kwargs.items() if k not in _OF_APPLY}
    conversion.check_call(
        method,
        (module, *call.args),
        kwargs,
        "convert(model, variables, *args, **kwargs) traces "
        "model.apply(variables, *args, **kwargs)",
    )


def _check_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns float variables as plain dictionaries.

    Raises:
        ValueError: if they lack "params", hold frozen weights, or have statistics of no
            batch.
    """
    if not isinstance(variables, Mapping) or "params" not in variables:
        raise ValueError(
            "convert takes the variables of a Linen model, a mapping with a collection "
            f"'params'; got {type(variables).__name__}"
            + (f" of {sorted(variables)}" if isinstance(variables, Mapping) else "")
            + "; parameters alone are {'params': params}"
        )
    if jax.tree.leaves(variables.get(COLLECTION, {})):
        raise ValueError(
            f"the variables hold frozen weights already (collection '{COLLECTION}'); "
            "convert takes the float variables of training"
        )
    variables = given_variables.unfrozen(variables)
    statistics_uses.check_gathered(
        variables.get(STATISTICS, {}),
        "gather some with aqtlite.flax.calibrate or model.apply(..., "
        f"mutable=['{STATISTICS}']), and convert these variables",
    )
    return variables
