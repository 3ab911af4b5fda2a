"""Sub-channel tiles: a contracting axis cut into pieces with a scale each."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite import config
from aqtlite import dimension_numbers as dn
from aqtlite.qtensor import QTensor
from aqtlite.sharding import explicit_sharding, spec_of_axes


def split(
    local_aqt: config.LocalAqt,
    path: str,
    g: jax.Array,
    other: jax.Array | QTensor,
    dims: dn.DimensionNumbers,
) -> tuple[jax.Array, jax.Array | QTensor, dn.DimensionNumbers]:
    """Cuts the first contracting axis into tiles that become a leading batch axis."""
    (g_ca, other_ca), (g_ba, other_ba) = dims
    count = local_aqt.contraction_axis_shard_count
    if not g_ca:
        raise ValueError(
            f"{path}.local_aqt splits a contracting axis, but this contraction has "
            f"none: its gradient has shape {g.shape}; leave local_aqt None"
        )
    if g.shape[g_ca[0]] % count:
        raise ValueError(
            f"{path}.local_aqt.contraction_axis_shard_count={count} does not divide "
            f"the contracting axis {g_ca[0]} of the gradient of shape {g.shape}"
        )

    def tile(x: jax.Array, axis: int) -> jax.Array:
        tiles = (count, x.shape[axis] // count)
        shape = (*x.shape[:axis], *tiles, *x.shape[axis + 1 :])
        cut = lax.reshape(x, shape, out_sharding=_cut_sharding(x, axis, count))
        return jnp.moveaxis(cut, axis, 0)

    g = tile(g, g_ca[0])
    if isinstance(other, QTensor):
        scale = jnp.expand_dims(other.scale, 0)
        other = QTensor(tile(other.qvalue, other_ca[0]), scale, other.dtype)
    else:
        other = tile(other, other_ca[0])

    def shift(axes: dn.Axes) -> dn.Axes:
        return tuple(axis + 1 for axis in axes)

    return (
        g,
        other,
        ((shift(g_ca), shift(other_ca)), ((0, *shift(g_ba)), (0, *shift(other_ba)))),
    )


def _cut_sharding(x: jax.Array, axis: int, count: int):
    """Whole tiles on each device where they divide evenly, else all on every one."""
    sharding = explicit_sharding(x)
    if sharding is None:
        return None
    spec = spec_of_axes(sharding, x.ndim)
    names = spec[axis] if isinstance(spec[axis], tuple) else (spec[axis],)
    devices = math.prod(sharding.mesh.shape[name] for name in names if name is not None)
    tiles = None if count % devices else spec[axis]
    return sharding.update(spec=(*spec[:axis], tiles, None, *spec[axis + 1 :]))
