"""Building blocks for the forms of all platforms."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from aqtlite.shapes import dimension_numbers as dn
from aqtlite.shapes import sharding


def dot(
    lhs: jax.Array,
    rhs: jax.Array,
    dims: dn.DimensionNumbers,
    out_sharding: jax.sharding.NamedSharding | None = None,
    precision: lax.PrecisionLike = None,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Contracts by `lax.dot_general`; sums have `dtype`, or else the `accumulator`."""
    return lax.dot_general(
        lhs,
        sharding.with_batch_axes_of(lhs, rhs, dims[1]),
        dims,
        precision=precision,
        preferred_element_type=accumulator(lhs) if dtype is None else dtype,
        out_sharding=out_sharding,
    )


def accumulator(x: jax.Array) -> DTypeLike:
    """Returns the dtype of sums: int32 for integers, at least float32 for floats."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.int32
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def is_float8(x: jax.Array) -> bool:
    """Returns True for floats of 8 bits."""
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 1


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


def place_of(
    number: jax.Array, sizes: Sequence[int], steps: Sequence[int]
) -> list[jax.Array]:
    """Returns the place of an element of an array that lies in steps along each axis.

    Unlike `jnp.unravel_index`, this neither checks nor clips.

    Args:
        number: number of the element in row-major order, int32.
        sizes: sizes of the array.
        steps: distances between elements.
    """
    place: list[jax.Array] = []
    for axis in reversed(range(len(sizes))):
        index, size = number, np.int32(sizes[axis])
        if axis > 0:
            index, number = lax.rem(number, size), lax.div(number, size)
        step = np.int32(steps[axis])
        place.insert(0, index if step == 1 else lax.mul(index, step))
    return place


def part_at(x: jax.Array, start: Sequence[Any], sizes: Sequence[int]) -> jax.Array:
    """Returns a part of an array; `start` counts from the front, as int32."""
    return lax.dynamic_slice(x, start, sizes, allow_negative_indices=False)


def with_part_at(x: jax.Array, start: Sequence[Any], part: jax.Array) -> jax.Array:
    """Replaces a part of an array, as `part_at`."""
    return lax.dynamic_update_slice(x, part, start, allow_negative_indices=False)
