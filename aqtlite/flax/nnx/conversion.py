"""NNX models whose weights are frozen."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from aqtlite.contraction import differentiation
from aqtlite.flax.call import Call
from aqtlite.flax.nnx import partitioning
from aqtlite.flax.nnx.model import QuantizedModel, state_of
from aqtlite.flax.nnx.pure import PureCall
from aqtlite.flax.nnx.quantize import function_of
from aqtlite.flax.nnx.variables import Frozen, Recipe, Sample, Statistics
from aqtlite.jaxpr import scopes
from aqtlite.program.freezing import FunctionCall, FunctionModel
from aqtlite.program.program import Program
from aqtlite.program.serving import planning
from aqtlite.program.serving.frozen_record import IDENTITY, RECORD, recipe_name
from aqtlite.program.serving.model import Parameter, StoredWeight
from aqtlite.program.serving.placeholder import Placeholder
from aqtlite.program.serving.planning import Plan
from aqtlite.quantization.fixed_scale import FixedScale
from aqtlite.quantization.state_collections import STATISTICS


class NnxModel(FunctionModel):
    """An NNX model whose calls are functions of its parameters."""

    def __init__(self, model: QuantizedModel, calls: Sequence[PureCall]):
        self._model, self._call, state = model, calls[0], state_of(model)
        params = self._call.params
        programs = []
        for call in calls:
            _, *others = call.arguments
            function = FunctionCall(function_of(model, call), tuple(others), {})
            programs.append(function.program(params, state))
        _check_is_quantized(programs)
        super().__init__(programs, params, state)

    def serving(
        self,
        stored: Sequence[StoredWeight],
        frozen: Mapping[Parameter, Placeholder],
    ) -> QuantizedModel:
        """Makes a serving model of the model."""
        weights: dict[str, dict[str, Frozen[Any]]] = {}
        samples: dict[str, dict[str, Sample[Any]]] = {}
        for one in stored:
            module, side = "/".join(one.module), one.record.operand.side
            metadata = partitioning.metadata_of(one, self._call.variables)
            metadata[RECORD] = one.record
            variable = Frozen(one.values[side], **metadata)
            weights.setdefault(module, {})[one.name] = variable
            if IDENTITY in one.values:
                sample = Sample(one.values[IDENTITY], eager_sharding=False)
                samples.setdefault(module, {})[one.name] = sample
        self._call.replace_params(self.with_placeholders(frozen))
        aqt, name = self._model.aqt, recipe_name([one.record for one in stored])
        aqt.frozen, aqt.samples = nnx.data(weights), nnx.data(samples)
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
        model: with its float variables, or their shapes.
        calls: that will be served.

    Raises:
        ValueError: as `convert` does.
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
    """Refuses calls without any contraction whose weight could be frozen.

    Raises:
        ValueError: if they are such.
    """
    if any(one.plan.quantized() for one in programs):
        return
    why = "no rule names a contraction, and no layer has an AqtDotGeneral"
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
