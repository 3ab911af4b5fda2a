"""Quantized NNX models: their variables, rules and states."""

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from aqtlite.flax.nnx import partitioning
from aqtlite.program.rules.rules import Rule
from aqtlite.program.serving.frozen_record import IDENTITY, RECORD
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization.states.state_collections import (
    ADAPTER,
    DROPOUT,
    OF_GRADIENTS,
    PARAMETERS,
    STATISTICS,
)

A = TypeVar("A")


class Frozen(nnx.Variable[A]):
    """A frozen weight of a serving model: a `QTensor` of integers and scales.

    Its metadata `out_sharding` has the parameter's axis names, in the order of the axes
    of the stored integers. `nnx.get_partition_spec` and `nnx.get_named_sharding` return
    a `QTensor` of specs or shardings; scales are not partitioned along axes that share
    a scale.
    """

    def replace(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces the value, as `nnx.Variable.replace` does.

        Extends a spec or sharding of one array to each array of the `QTensor`.
        """
        return super().replace(*map(self._of_each_array, args), **kwargs)

    def set_value(self, value: Any, **kwargs: Any) -> None:
        """Sets the value, as `nnx.Variable.set_value` does; see `replace`."""
        super().set_value(self._of_each_array(value), **kwargs)

    def _of_each_array(self, value: Any) -> Any:
        qtensor = self.get_raw_value()
        if not isinstance(qtensor, QTensor):
            return value
        if isinstance(value, PartitionSpec):
            return partitioning.specs_of(qtensor, value)
        if isinstance(value, jax.ShapeDtypeStruct):
            return partitioning.sharded(qtensor, value.sharding)
        return value


class Recipe(Frozen[A]):
    """The recipe of a serving model's frozen weights: a pytree without leaves.

    Checkpoints keep its name; see `FrozenRecord.recipe`. It derives from `Frozen` so
    that `nnx.split` by that type includes it.
    """

    @property
    def sharding(self) -> PartitionSpec:
        """An empty spec; without one, NNX would shard the value as an array."""
        return PartitionSpec()

    def _of_each_array(self, value: Any) -> Any:
        return value if isinstance(value, Mapping) else self.get_raw_value()


class Sample(Frozen[A]):
    """Samples of parameters that stay in float beside their frozen weight.

    Serving compares them to detect that the parameters have changed.
    """

    def _of_each_array(self, value: Any) -> Any:
        return value


def is_weight(variable: Any) -> bool:
    """Whether a variable is a frozen weight."""
    return isinstance(variable, Frozen) and not isinstance(variable, Recipe | Sample)


class Statistics(nnx.Variable[A]):
    """Statistics of a contraction's operands, for static ranges."""


class GradientStatistics(nnx.Variable[A]):
    """Statistics of a contraction's output gradient.

    To be replaced by their own gradient; see `overwrite_with_gradient`.
    """


ATTRIBUTE = "aqt"
"""Name of the attribute of a quantized model with its `Quantization`."""

KINDS: dict[str, tuple[str, type[nnx.Variable[Any]]]] = {
    STATISTICS: ("statistics", Statistics),
    PARAMETERS: ("learned", nnx.Param),
    OF_GRADIENTS: ("gradient_statistics", GradientStatistics),
}
"""For each collection of states, its attribute in a `Quantization`, and its variable
type."""

ATTRIBUTES = {collection: attribute for collection, (attribute, _) in KINDS.items()}
"""For each collection of states, its attribute in a `Quantization`."""


class Quantization(nnx.Module):
    """Rules, states and frozen weights of a model: `QuantizedModel.aqt`."""

    def __init__(self, rules: tuple[Rule, ...], *, strict: bool, invariant: bool):
        self.rules = nnx.static(rules)
        self.strict = strict
        self.invariant = invariant
        self.use_running_average = False
        self.deterministic = True
        self.rngs: nnx.Rngs | None = nnx.data(None)
        self.statistics: dict[str, Any] = nnx.data({})
        self.learned: dict[str, Any] = nnx.data({})
        self.gradient_statistics: dict[str, Any] = nnx.data({})
        self.frozen: dict[str, dict[str, Frozen[Any]]] = nnx.data({})
        self.samples: dict[str, dict[str, Sample[Any]]] = nnx.data({})
        self.recipe: Recipe[Any] | None = nnx.data(None)

    def remove_adapters(self) -> None:
        """Removes the parameters of adapters; learned scales stay."""
        kept = {
            path: {field: x for field, x in entry.items() if field != ADAPTER}
            for path, entry in self.learned.items()
        }
        self.learned = nnx.data({path: entry for path, entry in kept.items() if entry})


class QuantizedModel(nnx.Module):
    """Base class of quantized models; see `quantize_model`.

    The class of a quantized model derives from this one and from the model's own class.
    """

    aqt: Quantization
    """Rules, statistics, learned scales and frozen weights."""

    _float_class: ClassVar[type[nnx.Module]]


class QuantizedLayer(nnx.Module):
    """Base class of the layers of a quantized model.

    The class of a layer derives from this one and from the layer's own class.
    """

    _float_class: ClassVar[type[nnx.Module]]
    _quantized_methods: ClassVar[Mapping[str, Any]]


def state_of(model: QuantizedModel) -> dict[str, Any]:
    """Returns the states of a model, in the form its function takes.

    With a key for the dropout of adapters, while ``model.aqt.deterministic`` is False.
    """
    states: dict[str, Any] = {
        collection: jax.tree.map(
            lambda variable: variable.get_value(), variables, is_leaf=is_variable
        )
        for collection, attribute in ATTRIBUTES.items()
        if (variables := getattr(model.aqt, attribute))
    }
    if model.aqt.rngs is not None and not model.aqt.deterministic:
        states[DROPOUT] = model.aqt.rngs.dropout()
    return states


def collection_of(model: QuantizedModel) -> dict[str, Any]:
    """Returns the frozen weights of a model, in the form its function takes."""
    found = {
        module: {name: _entry(variable) for name, variable in entries.items()}
        for module, entries in model.aqt.frozen.items()
    }
    for module, samples in model.aqt.samples.items():
        for name, sample in samples.items():
            if name in found.get(module, {}):
                found[module][name][IDENTITY] = sample.get_value()
    return found


def float_class_of(model: nnx.Module) -> type[nnx.Module]:
    """Returns the class of a model, or of a layer of it, before it was quantized."""
    if isinstance(model, QuantizedModel | QuantizedLayer):
        return model._float_class
    return type(model)


def set_class(model: nnx.Module, cls: type[nnx.Module]) -> None:
    """Changes the class of a model, past NNX's `__setattr__`."""
    object.__setattr__(model, "__class__", cls)


def is_variable(x: Any) -> bool:
    """Whether a node is an `nnx.Variable`."""
    return isinstance(x, nnx.Variable)


def _entry(variable: Frozen[Any]) -> dict[str, Any]:
    record = variable.get_metadata(RECORD)
    side = "rhs" if record is None else record.operand.side
    return {RECORD: record, side: variable.get_raw_value()}
