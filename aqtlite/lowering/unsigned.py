"""Contractions of int8 as uint8, for processors that multiply uint8 by int8.

With 128 added, lhs is unsigned, and ``lhs . rhs = (lhs + 128) . rhs - 128 . rhs``. All
of it is modulo 2^32, so that the sums are exact wherever int32 holds the result.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.shapes import dimension_numbers as dn


def offset(x: jax.Array) -> jax.Array:
    """Adds 128 to int8, as uint8: flips the sign bit."""
    return lax.bitcast_convert_type(x ^ np.int8(-128), jnp.uint8)


def dot(lhs: jax.Array, rhs: jax.Array, dims: dn.DimensionNumbers) -> jax.Array:
    """Contracts an offset lhs with int8 to int32, and takes the offset off the sums.

    The offset's share of the sums, 128 . rhs, is contracted as two rows: XLA:CPU has no
    fast path for one.
    """
    (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = dims
    rank = len(lhs_ba)
    batch, products = (tuple(lhs.shape[a] for a in axes) for axes in (lhs_ba, lhs_ca))
    rows = jnp.full((*batch, 2, *products), 128, jnp.uint8)
    rows_ca, rows_ba = tuple(range(rank + 1, rows.ndim)), tuple(range(rank))
    excess = mixed_dot(rows, rhs, ((rows_ca, rhs_ca), (rows_ba, rhs_ba)))
    excess = lax.index_in_dim(excess, 0, axis=rank, keepdims=False)
    remaining = dn.remaining_axes(lhs.ndim, lhs_ca, lhs_ba)
    axes = tuple(range(rank, rank + len(remaining)))
    return mixed_dot(lhs, rhs, dims) - jnp.expand_dims(excess, axes)


def dot_with_last_row_zero(
    lhs: jax.Array, rhs: jax.Array, dims: dn.DimensionNumbers
) -> jax.Array:
    """Contracts an offset lhs whose last row was zeros before the offset.

    That row's sums are 128 . rhs. lhs is ``(*batch, rows, *contracting)``.
    """
    out = mixed_dot(lhs, rhs, dims)
    return out - lax.slice_in_dim(out, -1, None, axis=len(dims[1][0]))


def mixed_dot(lhs: jax.Array, rhs: jax.Array, dims: dn.DimensionNumbers) -> jax.Array:
    """Contracts uint8 with int8 to int32.

    With a preset, JAX leaves the operands their dtypes; otherwise it casts both to
    int32 on CPUs.
    """
    return lax.dot_general(
        lhs,
        rhs,
        dims,
        precision=lax.DotAlgorithmPreset.DEFAULT,
        preferred_element_type=jnp.int32,
    )
