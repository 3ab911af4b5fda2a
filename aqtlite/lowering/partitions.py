"""A form for programs of one partition, another for those that XLA partitions.

What a processor runs fast, reshaped, padded or in a loop over blocks, XLA's partitioner
cannot keep sharded: it gathers the operands first. How many partitions there are is
known when a program is lowered, not when it is traced: shardings may come from
``jax.jit(..., in_shardings=...)``, or from a constraint further down.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType

_index_p = Primitive("partition_index")


def partition_dependent(
    *args: jax.Array, one: Callable[..., Any], several: Callable[..., Any]
) -> Any:
    """`one` of the arguments if a single device sees them whole, else `several`.

    As `lax.platform_dependent` chooses by platform: both are traced, one is compiled.
    Inside a `jax.shard_map` over all axes of its mesh, arrays are whole.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and set(mesh.axis_types) == {AxisType.Manual}:
        return one(*args)
    index = _index_p.bind()
    if isinstance(index, jax.core.Tracer):
        return lax.switch(index, [one, several], *args)
    is_sharded = any(jax.typeof(x).sharding.mesh.size > 1 for x in args)
    return several(*args) if is_sharded else one(*args)


# Called without jit: the arguments say where they are.
_index_p.def_impl(lambda: None)


@_index_p.def_abstract_eval
def _abstract_index() -> jax.core.ShapedArray:
    return jax.core.ShapedArray((), np.dtype("int32"))


def _lower_index(context: mlir.LoweringRuleContext) -> list[mlir.Value]:
    """A constant, by which XLA and MLIR choose before anything is partitioned."""
    axes = context.module_context.axis_context
    if isinstance(axes, mlir.ShardingContext):
        partitions = axes.num_devices
    elif isinstance(axes, mlir.SPMDAxisContext):  # Some axes are manual, not all.
        partitions = axes.mesh.size
    else:  # Replicas, which see their own arrays.
        partitions = 1
    return [mlir.ir_constant(np.int32(partitions > 1))]


mlir.register_lowering(_index_p, _lower_index)
