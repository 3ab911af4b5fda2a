"""Shardings that are part of an array's type."""

import jax


def explicit_sharding(x: jax.Array) -> jax.sharding.NamedSharding | None:
    """The sharding of an array on a mesh with explicit axes, None on any other.

    Where it is not None, JAX refuses to cut or to merge sharded axes, and a
    contraction has to be told the sharding of its result.
    """
    sharding = jax.typeof(x).sharding
    is_explicit = not sharding.mesh.empty and sharding.mesh.are_all_axes_explicit
    return sharding if is_explicit else None
