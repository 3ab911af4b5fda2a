"""The serving conversion of NNX models."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
from flax import nnx

from aqtlite.contraction import differentiation
from aqtlite.flax.call import Call, calls_of
from aqtlite.flax.nnx import partitioning
from aqtlite.flax.nnx.calls import function_of
from aqtlite.flax.nnx.model import (
    Frozen,
    QuantizedModel,
    Recipe,
    Sample,
    Statistics,
    float_class_of,
    state_of,
)
from aqtlite.flax.nnx.pure import PureCall
from aqtlite.flax.nnx.quantize import M, as_quantized
from aqtlite.jaxpr import scopes
from aqtlite.program.convert import FunctionModel, program_of
from aqtlite.program.program import Program
from aqtlite.program.serving import conversion, given, planning
from aqtlite.program.serving.frozen_record import (
    IDENTITY,
    RECORD,
    FrozenEntry,
    recipe_name,
)
from aqtlite.program.serving.model import Parameter
from aqtlite.program.serving.placeholder import Placeholder
from aqtlite.program.serving.planning import Plan
from aqtlite.program.serving.report import ConversionReport
from aqtlite.program.serving.weight import Weight
from aqtlite.qtensor.packed_values import PackedValues
from aqtlite.quantization.states import second_moment
from aqtlite.quantization.states.fixed_scale import FixedScale
from aqtlite.quantization.states.state_collections import STATISTICS


def convert(
    model: M,
    *args: Any,
    calls: Sequence[Call] | None = None,
    strict: bool = False,
    report: Callable[[ConversionReport], Any] | None = None,
    packed: str | None = None,
    **kwargs: Any,
) -> M:
    """Freezes the quantized weights of a model into a serving model.

    A weight is an operand of a quantized contraction that depends only on parameters.
    The call is traced; the part of the program that computes the weights runs once, and
    the rest does not run. Parameters that nothing else reads are removed:
    `aqtlite.is_frozen` tells their `nnx.Param`s from others. Integers and scales are
    `Frozen` variables in ``serving.aqt.frozen``, by the path of the module and the name
    of the parameter. Fixed scales of static ranges (`FixedScale`) replace the
    statistics they were computed from.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import aqtlite
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
    >>> aqtlite.is_frozen(serving.kernel), aqtlite.is_frozen(serving.bias)
    (True, False)

    Args:
        model: result of `quantize_model`, or a model with functions of
            `aqtlite.flax.nnx` in its layers. Its variables may hold
            `jax.ShapeDtypeStruct`s, as from `nnx.eval_shape`; then those of the result
            do, too. A parameter may hold a `QTensor` (`aqtlite.checkpoint.fill`), whose
            integers are kept where the config has its grid and blocks and the model
            only moves it; else it is decoded and rounded again.
        *args: the arguments of a call in serving, or their shapes. Other calls that
            contract the same weights are served, too.
        calls: in place of `args` and `kwargs`, several calls to serve, such as those of
            an encoder and a decoder:
            ``calls=[Call(x, method="encode"), Call(y, x, method="decode")]``. The
            weights of all calls are frozen, and a parameter is removed if none of them
            reads it.
        strict: raise if a weight stays in float and would be quantized at every call.
        report: function to call with the `ConversionReport`; `print` prints a table.
        packed: "cpu" packs int4 and int8 weights as the kernel of the extra ``cpu``
            reads them, so that `jax.jit` need not lay them out at every call. Other
            platforms, and CPUs without the kernel, unpack them at every call; results
            are the same. None stores them as they are; other names raise ValueError.
        **kwargs: as `args`; and `method`, the name of the method to call, if it is not
            ``"__call__"``.

    Returns:
        A model with results equal to those of `model` bit for bit, in `nnx.jit`, unless
        weights are rounded at conversion (`config.Gptq`). It shares the remaining
        arrays with `model`, but no variables. `Frozen` variables have the sharding
        metadata of their parameters.

    Raises:
        TypeError: if `model` is not an NNX module, `calls` is not a list of calls, or
            the model does not take the arguments of a call.
        ValueError: if the model is converted already, if no contraction is quantized,
            or if statistics have seen no batch; with `strict`, if a weight stays in
            float.
    """
    return convert_in_place(
        cast(M, nnx.clone(as_quantized(model))),
        *args,
        calls=calls,
        strict=strict,
        report=report,
        packed=packed,
        **kwargs,
    )


def convert_in_place(
    model: M,
    *args: Any,
    calls: Sequence[Call] | None = None,
    strict: bool = False,
    report: Callable[[ConversionReport], Any] | None = None,
    packed: str | None = None,
    **kwargs: Any,
) -> M:
    """Freezes the quantized weights of a model in place; see `convert`.

    Nothing is copied. The frozen parameters are removed from the model and from every
    other module that shares them, such as the argument of `quantize_model`.

    Args:
        model: as in `convert`.
        *args: as in `convert`.
        calls: as in `convert`.
        strict: as in `convert`. If it raises, the model is unchanged.
        report: as in `convert`.
        packed: as in `convert`.
        **kwargs: as in `convert`.

    Returns:
        `model`; or, if it is not a `QuantizedModel`, one that shares its variables.

    Raises:
        TypeError: as in `convert`.
        ValueError: as in `convert`.
    """
    quantized, calls = as_quantized(model), calls_of(calls, args, kwargs)
    for call in calls:
        _check_arguments(quantized, call)
    planned = plan(quantized, calls)
    serving = conversion.convert(planned, strict=strict, report=report, packed=packed)
    return cast(M, planned.model.fix_scales(serving))


def _check_arguments(model: QuantizedModel, call: Call) -> None:
    """Checks that the method of a call takes its arguments.

    Raises:
        TypeError: if it does not.
    """
    kwargs = dict(call.kwargs)
    name = kwargs.pop("method", "__call__")
    method = getattr(float_class_of(model), name, None)
    if inspect.isfunction(method):
        conversion.check_call(
            method,
            (model, *call.args),
            kwargs,
            "convert(model, *args, **kwargs) traces model(*args, **kwargs)",
        )


class NnxModel(FunctionModel):
    """The calls of an NNX model as functions of its parameters."""

    def __init__(self, model: QuantizedModel, calls: Sequence[PureCall]):
        self._model, self._call, state = model, calls[0], state_of(model)
        params, quantized = given.split(self._call.params)
        programs = []
        for call in calls:
            _, *others = call.arguments
            function = function_of(model, call)
            programs.append(program_of(function, params, tuple(others), {}, state))
        _check_is_quantized(programs)
        super().__init__(programs, params, state, quantized)

    def serving(
        self,
        weights: Sequence[Weight],
        stored: Sequence[FrozenEntry],
        frozen: Mapping[Parameter, Placeholder],
    ) -> QuantizedModel:
        """Turns the model into a serving model, in place."""
        frozen_by_module: dict[str, dict[str, Frozen[Any]]] = {}
        samples: dict[str, dict[str, Sample[Any]]] = {}
        for weight, one in zip(weights, stored, strict=True):
            module, side = "/".join(one.module), one.record.operand.side
            q, metadata = one.values[side], dict[str, Any]()
            if not isinstance(q.qvalue, PackedValues):  # Its axes have no names.
                metadata = partitioning.metadata_of(weight, self._call.variables)
            metadata[RECORD] = one.record
            variable = Frozen(q, **metadata)
            frozen_by_module.setdefault(module, {})[one.name] = variable
            if IDENTITY in one.values:
                sample = Sample(one.values[IDENTITY], eager_sharding=False)
                samples.setdefault(module, {})[one.name] = sample
        self._call.replace_params(self.with_placeholders(frozen))
        aqt, name = self._model.aqt, recipe_name([one.record for one in stored])
        aqt.frozen, aqt.samples = nnx.data(frozen_by_module), nnx.data(samples)
        aqt.statistics = nnx.data(second_moment.without(aqt.statistics))
        aqt.recipe = nnx.data(Recipe({name: {}}, eager_sharding=False))
        return self._model

    def fix_scales(self, serving: QuantizedModel) -> QuantizedModel:
        if serving.aqt.frozen and serving.aqt.statistics:
            fixed = self.fixed_state(state_of(serving))[STATISTICS]
            serving.aqt.statistics = nnx.data(
                jax.tree.map(Statistics, fixed, is_leaf=_is_fixed_scale)
            )
        return serving


def _is_fixed_scale(x: Any) -> bool:
    return isinstance(x, FixedScale)


def plan(model: QuantizedModel, calls: Sequence[Call]) -> Plan:
    """Plans a conversion from traces alone.

    Args:
        model: a model with float variables, or their shapes.
        calls: calls to serve.

    Raises:
        ValueError: as in `convert`.
    """
    if model.aqt.frozen:
        raise ValueError(
            "the model is converted already: convert takes the float model of training"
        )
    pure = []
    for call in calls:
        kwargs = dict(call.kwargs)
        method = kwargs.pop("method", "__call__")
        pure.append(PureCall(model, method, call.args, kwargs))
    return planning.plan(NnxModel(model, pure))


def _check_is_quantized(programs: Sequence[Program]) -> None:
    """Refuses calls without a contraction to quantize.

    Raises:
        ValueError: if no call has any.
    """
    if any(one.plan.operations() for one in programs):
        return
    why = (
        "no rule names a contraction, and no layer has an AqtDotGeneral: convert "
        "quantize_model(model, cfg), if the model is a float model"
    )
    if any(rule.cfg is not None for rule in programs[0].plan.rules):
        reasons = "; ".join(one.plan.reasons() for one in programs)
        why = f"the rules quantize none of its contractions{reasons}"
    if any(scopes.occurs(differentiation.SCOPE, one.traced.jaxpr) for one in programs):
        why = (
            "its contractions are quantized by functions whose weights NNX cannot "
            "freeze: inject those of aqtlite.flax.nnx, or name contractions by rules, "
            "in place of aqtlite.flax.AqtDotGeneral or aqtlite.make_dot_general"
        )
    raise ValueError(f"nothing to freeze in the call: {why}")
