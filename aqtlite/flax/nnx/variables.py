"""The types of the variables that quantized NNX models have."""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from aqtlite.flax.nnx import partitioning
from aqtlite.qtensor.qtensor import QTensor

A = TypeVar("A")


class Frozen(nnx.Variable[A]):
    """A frozen weight of a serving model: a `QTensor` of integers and scales.

    Its metadata `out_sharding` has the names of the axes of the integers as they are
    stored, those of the parameter that the weight was made of. `nnx.get_partition_spec`
    and `nnx.get_named_sharding` give a `QTensor` of them, in which scales are not
    partitioned along axes that share one.
    """

    def replace(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces the value, as `nnx.Variable.replace` does.

        What NNX says of the sharding of one array becomes that of each array.
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
    """How the frozen weights of a serving model were made: a pytree without leaves.

    Checkpoints keep it by the name in it; see `FrozenRecord` of frozen weights. It
    is among the `Frozen` variables for `nnx.split` by their type.
    """

    @property
    def sharding(self) -> PartitionSpec:
        """That of nothing. NNX takes a value that has none for an array to shard."""
        return PartitionSpec()

    def _of_each_array(self, value: Any) -> Any:
        return value if isinstance(value, Mapping) else self.get_raw_value()


class Sample(Frozen[A]):
    """Values of the parameters that stay beside a frozen weight for their other uses.

    They tell whether the parameters are those that the weight was made of.
    """

    def _of_each_array(self, value: Any) -> Any:
        return value


def is_weight(variable: Any) -> bool:
    """Whether a variable is a frozen weight."""
    return isinstance(variable, Frozen) and not isinstance(variable, Recipe | Sample)


class Statistics(nnx.Variable[A]):
    """The statistics of the operands of a contraction, for static ranges."""


class GradientStatistics(nnx.Variable[A]):
    """The statistics of the output gradient of a contraction.

    Their gradient is what takes their place: see `overwrite_with_gradient`.
    """
