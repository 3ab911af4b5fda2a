"""The conversion of an NNX model: the plan, and what it makes of the model."""

import dataclasses
from collections.abc import Collection, Sequence
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
from aqtlite.program import freezing
from aqtlite.program.freezing import FunctionCall
from aqtlite.program.program import Program
from aqtlite.program.serving.call_site import IDENTITY, SITE, recipe_name
from aqtlite.program.serving.conversion import Stored
from aqtlite.program.serving.model import Parameter
from aqtlite.program.serving.planning import Weight
from aqtlite.program.serving.report import ConversionReport
from aqtlite.quantization.fixed_scale import FixedScale
from aqtlite.quantization.state_collections import STATISTICS


@dataclasses.dataclass(frozen=True)
class Serving:
    """What a conversion makes of the variables of a model."""

    params: Any
    """The parameters that are left, and `FrozenParameter`s."""

    frozen: dict[str, dict[str, Frozen[Any]]]
    """By module and name."""

    samples: dict[str, dict[str, Sample[Any]]]
    """Of the parameters that stay beside frozen weights: by module and name of these.
    """


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A planned conversion of an NNX model."""

    model: QuantizedModel
    call: PureCall
    """One of those that are served, which has all parameters."""

    functions: freezing.Conversion

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The weights that will be frozen."""
        return self.functions.weights

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters of the model, by number."""
        return self.functions.model.parameters

    def keep_float(self, paths: Collection[tuple[str, ...]]) -> "Conversion":
        """Returns a conversion that leaves weights with these paths in float."""
        kept = self.functions.keep_float(paths)
        return dataclasses.replace(self, functions=kept)

    def run(self) -> tuple[Serving, ConversionReport]:
        """Returns variables, or their shapes, and what became of each parameter."""
        stored = self.functions.freeze()
        frozen: dict[str, dict[str, Frozen[Any]]] = {}
        samples: dict[str, dict[str, Sample[Any]]] = {}
        for weight, one in zip(self.weights, stored, strict=True):
            module = "/".join(weight.module)
            entries = frozen.setdefault(module, {})
            entries[weight.name] = self._variable(weight, one)
            if IDENTITY in one.values:
                of_module = samples.setdefault(module, {})
                of_module[weight.name] = Sample(
                    one.values[IDENTITY], eager_sharding=False
                )
        params = self.functions.serving(stored)["params"]
        return Serving(params, frozen, samples), self.functions.report(stored)

    def _variable(self, weight: Weight, stored: Stored) -> Frozen[Any]:
        side = weight.site.operand.side
        axes = stored.axes[side].qvalue
        metadata = partitioning.metadata_of(axes, self.call.variables)
        metadata[SITE] = weight.site
        return Frozen(stored.values[side], **metadata)

    def write(self, serving: Serving) -> None:
        """Makes a serving model of the model.

        Args:
            serving: what `run` returned.
        """
        self.call.replace_params(serving.params)
        self.model.aqt.frozen = nnx.data(serving.frozen)
        self.model.aqt.samples = nnx.data(serving.samples)
        name = recipe_name([weight.site for weight in self.weights])
        self.model.aqt.recipe = nnx.data(Recipe({name: {}}, eager_sharding=False))

    def fix_scales(self, model: QuantizedModel) -> None:
        """Puts scales in place of the statistics of the operands of a serving model.

        Args:
            model: what the conversion makes, with the values of its variables.
        """
        if model.aqt.frozen and model.aqt.statistics:
            state = state_of(model)
            fixed = dataclasses.replace(self.functions, state=state).fixed_state()
            model.aqt.statistics = nnx.data(
                jax.tree.map(Statistics, fixed[STATISTICS], is_leaf=_is_fixed_scale)
            )


def _is_fixed_scale(x: Any) -> bool:
    return isinstance(x, FixedScale)


def plan(model: QuantizedModel, calls: Sequence[Call]) -> Conversion:
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
    state = state_of(model)
    pure, functions = [], []
    for call in calls:
        kwargs = dict(call.kwargs)
        method = kwargs.pop("method", "__call__")
        one = PureCall(model, method, call.args, kwargs)
        _, *others = one.arguments
        pure.append(one)
        functions.append(FunctionCall(function_of(model, one), tuple(others), {}))
    params = pure[0].params
    programs = [call.program(params, state) for call in functions]
    _check_is_quantized(programs)
    return Conversion(model, pure[0], freezing.plan(programs, params, state))


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
