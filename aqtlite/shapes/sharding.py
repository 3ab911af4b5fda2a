"""Types of arrays: as text, and their shardings and varying mesh axes."""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Tree = TypeVar("Tree")
Sharding = TypeVar("Sharding", NamedSharding, PartitionSpec)


def explicit_sharding(x: jax.Array | jax.ShapeDtypeStruct) -> NamedSharding | None:
    """Returns the sharding of an array on a mesh with explicit axes, otherwise None.

    With explicit axes, JAX refuses to split or merge sharded axes, and a contraction
    may have to be given the sharding of its result. Other axes of the mesh may be
    automatic.
    """
    sharding = jax.typeof(x).sharding
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None


def sharding_of_gradient(x: jax.Array | jax.ShapeDtypeStruct) -> NamedSharding | None:
    """Returns the explicit sharding of the gradient of an array, otherwise None.

    An array from outside of the current mesh is whole on its devices, and so is its
    gradient, even if that is a sum over a sharded axis.
    """
    sharding = jax.typeof(x).sharding
    mesh = jax.sharding.get_abstract_mesh()
    if sharding.mesh.empty and AxisType.Explicit in mesh.axis_types:
        return NamedSharding(mesh, PartitionSpec())
    return explicit_sharding(x)


def shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and explicit sharding of an abstract value."""
    sharding = aval.sharding
    is_explicit = AxisType.Explicit in sharding.mesh.axis_types
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding if is_explicit else None
    )


def describe(x: Any) -> str:
    """Returns the dtype and shape of `x` as JAX writes them, such as "float32[8,24]".

    Args:
        x: anything with a `shape` and a `dtype`, which may be its name; another object
            gives its repr.
    """
    if not (hasattr(x, "dtype") and hasattr(x, "shape")):
        return repr(x)
    name = getattr(x.dtype, "name", x.dtype)
    return f"{name}[{','.join(map(str, x.shape))}]"


def shape_of_slice(x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and sharding of one element along the first axis."""
    sharding = explicit_sharding(x)
    if sharding is not None:
        sharding = sharding.update(spec=PartitionSpec(*sharding.spec[1:]))
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)


def zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns zeros of a shape, dtype and sharding."""
    return jnp.zeros(shape.shape, shape.dtype, device=shape.sharding)


def explicit_spec(x: Any) -> PartitionSpec | None:
    """Returns the spec of an explicitly sharded array; None if it is not sharded."""
    sharding = explicit_sharding(x)
    if sharding is None or all(names is None for names in sharding.spec):
        return None
    return sharding.spec


def on_current_mesh(spec: PartitionSpec | None) -> NamedSharding | None:
    """Returns a sharding on the current mesh; None if it lacks these explicit axes."""
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
    """Shards a factor like the array that it multiplies.

    Args:
        x: the factor, with size 1 along axes that broadcast.
        out_sharding: sharding of the array; None returns `x` unchanged.
    """
    if out_sharding is None or explicit_sharding(x) is None:
        return x
    axes = spec_of_axes(out_sharding, x.ndim)
    kept = [None if size == 1 else one for size, one in zip(x.shape, axes, strict=True)]
    return jax.sharding.reshard(x, out_sharding.update(spec=PartitionSpec(*kept)))


def replicated(x: jax.Array) -> jax.Array:
    """Replicates an array on a mesh with explicit axes; on other meshes, returns `x`.

    For operations that JAX refuses along sharded axes.
    """
    sharding = explicit_sharding(x)
    if sharding is None:
        return x
    return jax.sharding.reshard(x, sharding.update(spec=PartitionSpec()))


def replicated_along(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Replicates an array along some axes, as `replicated` does along all."""
    sharding = explicit_sharding(x)
    if sharding is None:
        return x
    spec = spec_of_axes(sharding, x.ndim)
    kept = [None if axis in axes else one for axis, one in enumerate(spec)]
    return jax.sharding.reshard(x, sharding.update(spec=PartitionSpec(*kept)))


def with_batch_axes_of(
    lhs: jax.Array, rhs: jax.Array, batch: tuple[Sequence[int], Sequence[int]]
) -> jax.Array:
    """Shards the batch axes of rhs like those of lhs, on a mesh with explicit axes.

    JAX 0.12 contracts no others; earlier versions did this themselves.

    Args:
        lhs: left operand.
        rhs: right operand.
        batch: batch axes of lhs, and of rhs.
    """
    found = explicit_sharding(lhs), explicit_sharding(rhs)
    known = next((one for one in found if one is not None), None)
    if known is None:
        return rhs
    of_lhs, of_rhs = (
        [None] * x.ndim if one is None else spec_of_axes(one, x.ndim)
        for x, one in zip((lhs, rhs), found, strict=True)
    )
    wanted = list(of_rhs)
    for lhs_axis, rhs_axis in zip(*batch, strict=True):
        wanted[rhs_axis] = of_lhs[lhs_axis]
    if wanted == of_rhs:
        return rhs
    return jax.sharding.reshard(rhs, known.update(spec=PartitionSpec(*wanted)))


def with_sharding_of(like: jax.Array | jax.ShapeDtypeStruct, x: jax.Array) -> jax.Array:
    """Shards an array like another one of its shape, on a mesh with explicit axes."""
    sharding = explicit_sharding(like)
    return x if sharding is None else jax.sharding.reshard(x, sharding)


def zeros_like(x: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """Returns zeros of the shape, dtype and explicit sharding of an array.

    In JAX 0.12, those of `jax.numpy` lose the sharding where no mesh is current.
    """
    return with_sharding_of(x, jnp.zeros_like(x))


def whole_where_uneven(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Replicates an array along axes that devices could not divide in a new shape.

    On a mesh with explicit axes, JAX refuses to resize an array along a sharded axis to
    a size that the number of devices does not divide.

    Args:
        x: the array.
        shape: the new shape.
    """
    sharding = explicit_sharding(x)
    if sharding is None:
        return x
    spec = [
        None if size % num_devices(sharding, names) else names
        for size, names in zip(shape, spec_of_axes(sharding, x.ndim), strict=True)
    ]
    return jax.sharding.reshard(x, sharding.update(spec=PartitionSpec(*spec)))


def num_devices(sharding: NamedSharding, names: Any) -> int:
    """Returns the number of devices along the entry of a sharding for an axis."""
    each = names if isinstance(names, tuple) else (names,)
    return math.prod(sharding.mesh.shape[name] for name in each if name is not None)


def before_transposition(
    sharding: Sharding | None, order: Sequence[int]
) -> Sharding | None:
    """Returns the sharding of an array before its axes are permuted by `order`."""
    if sharding is None:
        return None
    axes = spec_of_axes(sharding, len(order))
    before = PartitionSpec(*(axes[order.index(axis)] for axis in range(len(order))))
    if isinstance(sharding, NamedSharding):
        return sharding.update(spec=before)
    return before


def spec_of_axes(sharding: NamedSharding | PartitionSpec, ndim: int) -> list[Any]:
    """Returns the entry of a sharding for each axis of an array."""
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    return [*spec, *(None,) * (ndim - len(spec))]


def looked_up(table: jax.Array, places: jax.Array) -> jax.Array:
    """Returns elements of a vector, sharded explicitly like their places."""
    return table.at[places].get(out_sharding=explicit_sharding(places))


def names_of_blocks(names: Sequence[Any], shape: Sequence[int], x: Any) -> list[Any]:
    """Returns the names of the axes of an array that has a value for each block.

    An axis has the name of the axis that it describes if it is as long, or is sharded
    explicitly, as is that of blocks which devices hold whole. No other axis has a name:
    devices may not divide its blocks.

    Args:
        names: names of the axes of an array in blocks, such as a weight.
        shape: shape of that array.
        x: values of the blocks, keepdims, such as a scale.
    """
    entries = spec_of_axes(explicit_spec(x) or PartitionSpec(), x.ndim)
    axes = zip(names, shape, x.shape, entries, strict=True)
    return [
        name if size == own or entry is not None else None
        for name, size, own, entry in axes
    ]


def vary_together(trees: Tree) -> Tree:
    """Makes all arrays inside `jax.shard_map` vary over the same mesh axes.

    `lax.dot_general` does that with its operands. The gradient of an array that did not
    vary over a mesh axis is then summed over it.
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
