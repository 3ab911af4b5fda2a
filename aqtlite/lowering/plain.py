"""`lax.dot_general`, with an optional sharding."""

import jax
import numpy as np
from jax import lax

from aqtlite import dimension_numbers as dn


def dot(
    lhs: jax.Array,
    rhs: jax.Array,
    dims: dn.DimensionNumbers,
    accumulator: np.dtype | type,
    out_sharding: jax.sharding.NamedSharding | None = None,
    precision: lax.Precision | None = None,
) -> jax.Array:
    """The contraction as it stands, summed in `accumulator`."""
    sharding = {} if out_sharding is None else {"out_sharding": out_sharding}
    return lax.dot_general(
        lhs,
        rhs,
        dims,
        precision=precision,
        preferred_element_type=accumulator,
        **sharding,
    )
