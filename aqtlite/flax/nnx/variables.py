"""The types of the variables that quantized NNX models have."""

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


class Statistics(nnx.Variable[A]):
    """The statistics of the operands of a contraction, for static ranges."""


class GradientStatistics(nnx.Variable[A]):
    """The statistics of the output gradient of a contraction.

    Their gradient is what takes their place: see `overwrite_with_gradient`.
    """
