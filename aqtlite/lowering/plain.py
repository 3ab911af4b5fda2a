"""Building blocks of the forms of all platforms."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from aqtlite.shapes import dimension_numbers as dn


def dot(
    lhs: jax.Array,
    rhs: jax.Array,
    dims: dn.DimensionNumbers,
    accumulator: DTypeLike,
    out_sharding: jax.sharding.NamedSharding | None = None,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """The contraction as it stands, summed in `accumulator`."""
    sharding: dict[str, Any] = (
        {} if out_sharding is None else {"out_sharding": out_sharding}
    )
    return lax.dot_general(
        lhs,
        rhs,
        dims,
        precision=precision,
        preferred_element_type=accumulator,
        **sharding,
    )


def with_zeros(x: jax.Array, axis: int, count: int) -> jax.Array:
    """An array with zeros behind its end along one axis; they add nothing to a sum."""
    padding = [(0, count if a == axis else 0, 0) for a in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), padding)
