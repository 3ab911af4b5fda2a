"""Sums over devices in an order by their numbers.

Every device sums its share of the elements by halves of the devices, which takes twice
the memory of the elements, as a reduction by a ring does.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite.lowering.sums import Sum


def psum(
    x: jax.Array, axes: tuple[Any, ...], groups: Any = None, to: str = "varying"
) -> jax.Array:
    """Sums an array over devices, as `jax.lax.psum`.

    Args:
        x: float32, any shape.
        axes: names of axes of the mesh.
        groups: as ``axis_index_groups`` of `jax.lax.psum`.
        to: as that of `jax.lax.all_gather`.
    """
    count = _count(axes, groups)
    share = -(-x.size // count)
    parts = jnp.pad(x.reshape(-1), (0, share * count - x.size)).reshape(count, share)
    total = lax.all_gather(
        _summed(parts, axes, groups),
        axes,
        axis_index_groups=groups,
        tiled=True,
        to=to,
    )
    return total[: x.size].reshape(x.shape)


def reduce_scatter(
    x: jax.Array, axes: Any, groups: Any, dimension: int, tiled: bool
) -> jax.Array:
    """Sums an array over devices and divides it, as `jax.lax.psum_scatter`.

    Args:
        x: float32.
        axes: names of axes of the mesh.
        groups: as ``axis_index_groups``.
        dimension: axis of `x` to divide.
        tiled: whether the result keeps the axis.
    """
    count = _count(axes, groups)
    size = x.shape[dimension] // count
    before, after = x.shape[:dimension], x.shape[dimension + 1 :]
    parts = jnp.moveaxis(x.reshape(*before, count, size, *after), dimension, 0)
    out = _summed(parts, axes, groups)
    return out if tiled else out.squeeze(dimension)


def _count(axes, groups):
    """Returns the number of devices that are summed over."""
    if groups is not None:
        return len(groups[0])
    return math.prod(lax.axis_size(one) for one in axes)


def _summed(parts, axes, groups):
    """Sums the parts that all devices have for one of them."""
    received = lax.all_to_all(parts, axes, 0, 0, axis_index_groups=groups)
    return Sum((0,))(received)
