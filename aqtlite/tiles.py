"""Sub-channel tiles: an axis cut into pieces with a scale each."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite.sharding import explicit_sharding, spec_of_axes


def cut(x: jax.Array, axis: int, count: int) -> jax.Array:
    """Cuts an axis into tiles, along a new leading axis.

    Args:
        x: any dtype and shape.
        axis: the axis, of a size that `count` divides.
        count: how many tiles.

    Returns:
        Shape ``(count, ...)``, in which `axis` of x is smaller by that factor.
    """
    tiles = (count, x.shape[axis] // count)
    shape = (*x.shape[:axis], *tiles, *x.shape[axis + 1 :])
    split = lax.reshape(x, shape, out_sharding=_sharding(x, axis, count))
    return jnp.moveaxis(split, axis, 0)


def _sharding(x: jax.Array, axis: int, count: int):
    """Whole tiles on each device where they divide evenly, else all on every one."""
    sharding = explicit_sharding(x)
    if sharding is None:
        return None
    spec = spec_of_axes(sharding, x.ndim)
    names = spec[axis] if isinstance(spec[axis], tuple) else (spec[axis],)
    devices = math.prod(sharding.mesh.shape[name] for name in names if name is not None)
    tiles = None if count % devices else spec[axis]
    return sharding.update(spec=(*spec[:axis], tiles, None, *spec[axis + 1 :]))
