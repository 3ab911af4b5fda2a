"""One dot of an execution's kind, and the scales that multiply its sums."""

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite import lowering
from aqtlite.contraction.execution import ContractionExecution
from aqtlite.lowering import exact
from aqtlite.lowering.elementwise import spread
from aqtlite.operations import DotInput, Operation, Side
from aqtlite.shapes import block_shapes
from aqtlite.shapes.sharding import explicit_sharding, sharded_like


def dot(
    how: ContractionExecution, operation: Operation, left: DotInput, right: DotInput
) -> jax.Array:
    """Contracts two inputs by the kind of dot that the execution has, unscaled."""
    kind: lowering.Kind = lowering.Floats(how.precision, how.accumulator)
    if how.kind == "integers":
        kind = lowering.Integers(how.accumulator)
    elif how.kind == "integers in float" and how.in_dtype is not None:
        kind = lowering.IntegersInFloat(how.in_dtype, how.accumulator)
    elif how.kind == "mixed":
        kind = lowering.Mixed(how.out_dtype, how.precision, how.accumulator)
    elif how.kind == "narrow":
        kind = lowering.Narrow(how.accumulator)
    sums = operation.contract(kind, left, right, how.out_sharding)
    return sums if how.accumulator is None else sums.astype(how.accumulator)


def multiplied(sums: jax.Array, scales: list[jax.Array]) -> jax.Array:
    """Multiplies sums by the scales of lhs and rhs.

    The scale of rhs, usually the weights, goes first: integers times the scale of a
    large lhs could overflow where the result does not.
    """
    if not scales:
        return sums
    layout = explicit_sharding(sums)
    factors = [sharded_like(one, layout) for one in reversed(scales)]
    if jnp.issubdtype(sums.dtype, jnp.integer):
        return exact.scaled_integers(sums, factors)
    *first, last = factors
    out = sums.astype(jnp.float32)
    for scale in first:
        out = lax.mul(out, spread(scale, out.shape))
    return exact.rounded_product(out, last)


def of_elements(
    operation: Operation, side: Side, x: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    """Repeats scales or zero points that blocks along kept axes, or groups, share."""
    axes = operation.axes(side)
    for axis in axes.batch + axes.remaining:
        if x.shape[axis] not in (1, shape[axis]):
            x = block_shapes.repeat(x, shape, (axis,))
    if axes.groups > 1:
        for axis in axes.cuttable:
            x = block_shapes.repeat_into(x, axis, axes.groups)
    return x
