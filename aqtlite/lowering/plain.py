"""Building blocks for the forms of all platforms."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from aqtlite.shapes import dimension_numbers as dn


def dot(
    lhs: jax.Array,
    rhs: jax.Array,
    dims: dn.DimensionNumbers,
    out_sharding: jax.sharding.NamedSharding | None = None,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Contracts by `lax.dot_general`, with sums in the operands' `accumulator`."""
    return lax.dot_general(
        lhs,
        rhs,
        dims,
        precision=precision,
        preferred_element_type=accumulator(lhs),
        out_sharding=out_sharding,
    )


def accumulator(x: jax.Array) -> DTypeLike:
    """Returns the dtype of sums: int32 for integers, at least float32 for floats."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.int32
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def without_int4(lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Widens int4 to int8: XLA's CPU and GPU backends do not contract int4."""
    left, right = (x.astype(jnp.int8) if x.dtype == jnp.int4 else x for x in (lhs, rhs))
    return left, right


def with_zeros(x: jax.Array, axis: int, count: int) -> jax.Array:
    """Appends zeros along an axis."""
    if count == 0:
        return x
    padding = [(0, count if a == axis else 0, 0) for a in range(x.ndim)]
    return lax.pad(x, np.zeros((), x.dtype), padding)


def unstacked(x: jax.Array, axis: int) -> list[jax.Array]:
    """Returns the slices along an axis, without it."""
    count = range(x.shape[axis])
    return [lax.index_in_dim(x, i, axis, keepdims=False) for i in count]
