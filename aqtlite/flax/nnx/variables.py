"""Variable types of quantized NNX models."""

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
