"""Bytes of arrays by their types."""

import math
from typing import Any

import jax
import jax.numpy as jnp


def of_type(aval: Any) -> int:
    """Returns the bytes of an array, where values of 4 bits take half a byte.

    >>> import jax
    >>> of_type(jax.ShapeDtypeStruct((3, 5), "int4"))
    8

    Args:
        aval: its type. Symbolic sizes (`jax.export`) count as one, and types without a
            number of bits, such as those of keys, as nothing.
    """
    dtype = getattr(aval, "dtype", None)
    size = math.prod(n for n in getattr(aval, "shape", ()) if isinstance(n, int))
    return -(-size * _bits(dtype) // 8)


def _bits(dtype: Any) -> int:
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return 0
    if jnp.issubdtype(dtype, jnp.floating):
        return int(jnp.finfo(dtype).bits)
    if jnp.issubdtype(dtype, jnp.integer):
        return int(jnp.iinfo(dtype).bits)
    return 8 * int(jnp.dtype(dtype).itemsize)
