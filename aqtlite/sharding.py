"""Shardings and varying mesh axes that are part of an array's type."""

from typing import Any, TypeVar

import jax
from jax import lax
from jax.sharding import AxisType

Tree = TypeVar("Tree")


def explicit_sharding(x: jax.Array) -> jax.sharding.NamedSharding | None:
    """The sharding of an array on a mesh with explicit axes, None on any other.

    Where it is not None, JAX refuses to cut or to merge sharded axes, and a
    contraction has to be told the sharding of its result. Other axes of the mesh may be
    automatic.
    """
    sharding = jax.typeof(x).sharding
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None


def sharded_like(x: jax.Array, out_sharding: Any) -> jax.Array:
    """An array that is to multiply one of this sharding, sharded like it.

    Args:
        x: of size 1 along the axes that it does not have.
        out_sharding: a `NamedSharding` or `PartitionSpec`; None leaves x as it is.
    """
    if out_sharding is None or explicit_sharding(x) is None:
        return x
    spec = getattr(out_sharding, "spec", out_sharding)
    spec = (*spec, *(None,) * (x.ndim - len(spec)))
    kept = [None if size == 1 else s for size, s in zip(x.shape, spec, strict=True)]
    return jax.sharding.reshard(x, jax.sharding.PartitionSpec(*kept))


def vary_together(trees: Tree) -> Tree:
    """Arrays inside `jax.shard_map`, each varying over all axes that any varies over.

    As `lax.dot_general` does with its operands. The gradient of an array that did not
    vary over an axis is thereby summed over it.
    """
    axes = frozenset().union(*map(_varying, jax.tree.leaves(trees)))

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - _varying(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, trees)


def _varying(x: jax.Array) -> frozenset[str]:
    """The manual axes of the mesh over which an array varies."""
    return jax.typeof(x).manual_axis_type.varying


def is_manual() -> bool:
    """Whether this is inside `jax.shard_map`."""
    return AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types
