"""The serving conversion of NNX models."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

from flax import nnx

from aqtlite.flax.call import Call, calls_of
from aqtlite.flax.nnx.conversion import plan
from aqtlite.flax.nnx.model import QuantizedModel, float_class_of
from aqtlite.flax.nnx.quantize import M, as_quantized
from aqtlite.program import arguments
from aqtlite.program.serving import conversion
from aqtlite.program.serving.report import ConversionReport


def convert(
    model: M,
    *args: Any,
    calls: Sequence[Call] | None = None,
    strict: bool = False,
    report: Callable[[ConversionReport], Any] | None = None,
    **kwargs: Any,
) -> M:
    """Freezes the quantized weights of a model into a serving model.

    The call is traced, and the part of the program that makes each weight, an operand
    of a quantized contraction that depends on parameters alone, is run once, and
    nothing else of it. A parameter that nothing else reads is gone: its `nnx.Param` has
    no arrays. Integers and scales are `Frozen` variables in ``serving.aqt.frozen``, by
    the path of the module and the name of the parameter. The scales of static ranges
    (`FixedScale`) take the place of the statistics that they come from.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from aqtlite import config
    >>> from aqtlite.flax.nnx import quantize_model
    >>> quantized = quantize_model(
    ...     nnx.Linear(32, 4, rngs=nnx.Rngs(0)), config.fully_quantized()
    ... )
    >>> x = jnp.ones((2, 32))
    >>> serving = convert(quantized, x)
    >>> bool((serving(x) == quantized(x)).all())
    True
    >>> serving.aqt.frozen[""]["kernel"].get_value()
    QTensor(int8[4,32], scale=float32[4,1], ...)
    >>> [x.shape for x in jax.tree.leaves(nnx.state(serving, nnx.Param))]
    [(4,)]

    Args:
        model: what `quantize_model` returned; or a model with functions of
            `aqtlite.flax.nnx` in its layers. Its variables may hold
            `jax.ShapeDtypeStruct`s, as `nnx.eval_shape` makes them; then those of the
            result do.
        *args: those of a call in serving, or their shapes. Other calls are served too
            if they contract the same weights.
        calls: in place of `args` and `kwargs`, several calls that will be served, such
            as those of an encoder and a decoder:
            ``calls=[Call(x, method="encode"), Call(y, x, method="decode")]``. What any
            of them contracts is frozen, and a parameter is gone if none reads it.
        strict: raises if a weight stays in float, rather than quantize it at every
            call.
        report: is called with a `ConversionReport`; `print` prints it as a table.
        **kwargs: as `args`; and `method`, the name of the method that is called, if it
            is not ``"__call__"``.

    Returns:
        A model that gives what `model` does, bit for bit, in `nnx.jit`. It shares the
        arrays that are left with `model`, and no variables. `Frozen` variables have the
        sharding metadata of the parameters that they are made of.

    Raises:
        TypeError: if `model` is no NNX module, `calls` are none, or the model does not
            take the arguments of a call.
        ValueError: if it is converted already, or if no contraction is quantized; with
            `strict`, if a weight stays in float.
    """
    return convert_in_place(
        cast(M, nnx.clone(as_quantized(model))),
        *args,
        calls=calls,
        strict=strict,
        report=report,
        **kwargs,
    )


def convert_in_place(
    model: M,
    *args: Any,
    calls: Sequence[Call] | None = None,
    strict: bool = False,
    report: Callable[[ConversionReport], Any] | None = None,
    **kwargs: Any,
) -> M:
    """Freezes the quantized weights of a model, as `convert` does, and its floats go.

    Nothing of the model is copied. The float parameters are gone from it, and from
    every other module that shares them, such as the one that `quantize_model` was
    given.

    Args:
        model: as `convert` takes it.
        *args: as `convert` takes them.
        calls: as `convert` takes them.
        strict: as `convert` takes it. A model that is refused is left as it was.
        report: as `convert` takes it.
        **kwargs: as `args`.

    Returns:
        `model`; or, if it is no `QuantizedModel`, one that shares its variables.

    Raises:
        TypeError: as `convert`.
        ValueError: as `convert`.
    """
    quantized, calls = as_quantized(model), calls_of(calls, args, kwargs)
    for call in calls:
        _check_arguments(quantized, call)
    planned = plan(quantized, calls)
    serving = conversion.convert(planned, strict=strict, report=report)
    return cast(M, planned.model.fix_scales(serving))


def _check_arguments(model: QuantizedModel, call: Call) -> None:
    """Checks that the method of a call takes its arguments.

    Raises:
        TypeError: if not.
    """
    kwargs = dict(call.kwargs)
    name = kwargs.pop("method", "__call__")
    method = getattr(float_class_of(model), name, None)
    if inspect.isfunction(method):
        arguments.check(
            method,
            (model, *call.args),
            kwargs,
            "convert(model, *args, **kwargs) traces model(*args, **kwargs)",
        )
