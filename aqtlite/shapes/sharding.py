"""Shardings and varying mesh axes that are part of an array's type."""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Tree = TypeVar("Tree")
Sharding = TypeVar("Sharding", NamedSharding, PartitionSpec)


def explicit_sharding(x: jax.Array) -> NamedSharding | None:
    """The sharding of an array on a mesh with explicit axes, None on any other.

    Where it is not None, JAX refuses to cut or to merge sharded axes, and a
    contraction has to be told the sharding of its result. Other axes of the mesh may be
    automatic.
    """
    sharding = jax.typeof(x).sharding
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None


def shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a type of arrays, and the sharding that is part of it."""
    sharding = aval.sharding
    is_explicit = AxisType.Explicit in sharding.mesh.axis_types
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding if is_explicit else None
    )


def shape_of_slice(x: jax.Array) -> jax.ShapeDtypeStruct:
    """The same of a slice along the first axis of an array."""
    sharding = explicit_sharding(x)
    if sharding is not None:
        sharding = sharding.update(spec=PartitionSpec(*sharding.spec[1:]))
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)


def zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros of this shape, dtype and sharding."""
    return jnp.zeros(shape.shape, shape.dtype, device=shape.sharding)


def explicit_spec(x: Any) -> PartitionSpec | None:
    """The axes of a mesh with explicit axes that an array is sharded over, if any."""
    sharding = explicit_sharding(x)
    if sharding is None or all(names is None for names in sharding.spec):
        return None
    return sharding.spec


def on_current_mesh(spec: PartitionSpec | None) -> NamedSharding | None:
    """A sharding over explicit axes of the current mesh; None if it has none such."""
    if spec is None:
        return None
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    names = [
        name
        for entry in spec
        for name in (entry if isinstance(entry, tuple) else (entry,))
        if name is not None
    ]
    if all(kinds.get(name) == AxisType.Explicit for name in names):
        return NamedSharding(mesh, spec)
    return None


def sharded_like(x: jax.Array, out_sharding: NamedSharding | None) -> jax.Array:
    """An array that is to multiply one of this sharding, sharded like it.

    Args:
        x: of size 1 along the axes that it does not have.
        out_sharding: sharding of all axes; None leaves x as it is.
    """
    if out_sharding is None or explicit_sharding(x) is None:
        return x
    axes = spec_of_axes(out_sharding, x.ndim)
    kept = [None if size == 1 else one for size, one in zip(x.shape, axes, strict=True)]
    return jax.sharding.reshard(x, PartitionSpec(*kept))


def replicated(x: jax.Array) -> jax.Array:
    """The whole array on each device of a mesh with explicit axes; on others, x.

    For operations that JAX refuses along sharded axes.
    """
    if explicit_sharding(x) is None:
        return x
    return jax.sharding.reshard(x, PartitionSpec())


def whole_where_uneven(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """An array of which each device has all of every axis that it could not share.

    On a mesh with explicit axes, JAX refuses to give an array another size along a
    sharded axis if the devices do not divide it.

    Args:
        x: the array.
        shape: that it is to get.
    """
    sharding = explicit_sharding(x)
    if sharding is None:
        return x
    spec = [
        None if size % _devices(sharding, names) else names
        for size, names in zip(shape, spec_of_axes(sharding, x.ndim), strict=True)
    ]
    return jax.sharding.reshard(x, PartitionSpec(*spec))


def _devices(sharding: NamedSharding, names: Any) -> int:
    each = names if isinstance(names, tuple) else (names,)
    return math.prod(sharding.mesh.shape[name] for name in each if name is not None)


def before_transposition(
    sharding: Sharding | None, order: Sequence[int]
) -> Sharding | None:
    """The sharding of what has this one once its axes are permuted."""
    if sharding is None:
        return None
    axes = spec_of_axes(sharding, len(order))
    before = PartitionSpec(*(axes[order.index(axis)] for axis in range(len(order))))
    if isinstance(sharding, NamedSharding):
        return sharding.update(spec=before)
    return before


def spec_of_axes(sharding: NamedSharding | PartitionSpec, ndim: int) -> list[Any]:
    """The entry of a sharding for each axis of an array."""
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    return [*spec, *(None,) * (ndim - len(spec))]


def vary_together(trees: Tree) -> Tree:
    """Arrays inside `jax.shard_map`, each varying over all axes that any varies over.

    As `lax.dot_general` does with its operands. The gradient of an array that did not
    vary over an axis is thereby summed over it.
    """
    leaves, structure = jax.tree.flatten(trees)
    own = [jax.typeof(x).manual_axis_type.varying for x in leaves]
    axes = frozenset().union(*own)
    varying = [
        lax.pcast(x, tuple(sorted(axes - one)), to="varying") if axes - one else x
        for x, one in zip(leaves, own, strict=True)
    ]
    together: Tree = jax.tree.unflatten(structure, varying)
    return together


def is_manual() -> bool:
    """Returns True inside `jax.shard_map`."""
    return AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types
