"""The types of the variables that quantized NNX models have."""

from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from aqtlite.flax.nnx import partitioning
from aqtlite.qtensor import QTensor

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

        A `jax.sharding.PartitionSpec`, or a shape with a sharding, which NNX gives to
        variables of one array, becomes one for each array.
        """
        value, *others = args or (None,)
        mine = self.get_raw_value()
        if isinstance(mine, QTensor) and isinstance(value, PartitionSpec):
            args = (partitioning.specs_of(mine, value), *others)
        elif isinstance(mine, QTensor) and isinstance(value, jax.ShapeDtypeStruct):
            args = (_sharded(mine, value.sharding), *others)
        return super().replace(*args, **kwargs)


class Statistics(nnx.Variable[A]):
    """The statistics of the operands of a contraction, for static ranges."""


class GradientStatistics(nnx.Variable[A]):
    """The statistics of the output gradient of a contraction.

    Their gradient is what takes their place: see `overwrite_with_gradient`.
    """


def _sharded(qtensor: QTensor, sharding: Any) -> Any:
    """The shapes of a frozen weight, with the shardings that one of its integers says.

    Args:
        qtensor: arrays, or shapes.
        sharding: of the integers.
    """
    if not isinstance(sharding, NamedSharding):
        return qtensor
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(sharding.mesh, spec)
        ),
        qtensor,
        partitioning.specs_of(qtensor, sharding.spec),
    )
