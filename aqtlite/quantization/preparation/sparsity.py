"""N:M sparsity: of each m consecutive elements, n are kept (`config.NofM`)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite import config
from aqtlite.lowering import exact
from aqtlite.operations import OperandAxes
from aqtlite.qtensor import stored_values
from aqtlite.qtensor.qtensor import Operand, QTensor
from aqtlite.shapes import block_shapes
from aqtlite.shapes.sharding import whole_where_uneven


def prune(x: Operand, tensor: config.Tensor, axes: OperandAxes, path: str) -> Operand:
    """Sets elements of an array to zero, as its config says.

    The gradient passes to all elements.

    Args:
        x: floating, or a `QTensor`, which has been pruned already.
        tensor: config of the array.
        axes: axes of the array.
        path: path of `tensor` in its config, for error messages.

    Raises:
        ValueError: if the grid has no zero.
    """
    how = tensor.sparsity
    if how is None or isinstance(x, QTensor):
        return x
    grid = tensor.grid
    if grid.zero_point_range is None and stored_values.zero(grid) is None:
        raise ValueError(
            f"{path}.numerics={grid!r} has no zero for the weights that {path}."
            f"sparsity={how!r} prunes, of shape {tuple(x.shape)}; choose another grid"
        )
    if of(tensor, x.shape, axes) is None:
        return x
    pruned: jax.Array = _pruned(how, axes.cuttable[-1], axes.groups, x)
    return pruned


def of(
    tensor: config.Tensor, shape: tuple[int, ...], axes: OperandAxes
) -> config.NofM | None:
    """Returns the sparsity of an array; None if it has none, or all would be kept.

    Args:
        tensor: config of the array.
        shape: shape of the array.
        axes: axes of the array. Without cuttable ones, as in a depthwise convolution,
            no elements are pruned together.
    """
    how = tensor.sparsity
    if how is None or not axes.cuttable:
        return None
    return how if shape[axes.cuttable[-1]] // axes.groups > how.n else None


def largest(magnitude: jax.Array, axis: int, count: int) -> jax.Array:
    """Returns where the largest elements along an axis are, as bools.

    Args:
        magnitude: floating, any shape.
        axis: a short axis.
        count: how many; of equal ones, the first. Each NaN is one of them.
    """
    place = lax.broadcasted_iota(jnp.int32, magnitude.shape, axis)
    rank = jnp.zeros(magnitude.shape, jnp.int32)
    for i in range(magnitude.shape[axis]):
        other = lax.index_in_dim(magnitude, i, axis)
        is_ahead = (other > magnitude) | ((other == magnitude) & (place > i))
        rank += is_ahead.astype(jnp.int32)
    return rank < count


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _pruned(how: config.NofM, axis: int, groups: int, x: jax.Array) -> jax.Array:
    return jnp.where(_kept(how, axis, groups, x), x, jnp.zeros_like(x))


def _pruned_fwd(how: config.NofM, axis: int, groups: int, x: jax.Array):
    is_kept = _kept(how, axis, groups, x)
    zeros = jnp.zeros_like(x)
    decay = None
    if how.decay:
        decay = jnp.where(is_kept, zeros, x) * np.asarray(how.decay, x.dtype)
    return jnp.where(is_kept, x, zeros), decay


def _pruned_bwd(how: config.NofM, axis: int, groups: int, decay, g: jax.Array):
    del how, axis, groups
    return (g if decay is None else g + decay,)


_pruned.defvjp(_pruned_fwd, _pruned_bwd)


def _kept(how: config.NofM, axis: int, groups: int, x: jax.Array) -> jax.Array:
    """Returns which elements are kept.

    Args:
        how: the sparsity.
        axis: axis of the groups of `how.m` elements.
        groups: number of parts of the axis that are pruned by themselves.
        x: the array.
    """
    magnitude = lax.abs(exact.float32(lax.stop_gradient(x)))
    if groups > 1:
        parts = block_shapes.split_axis(magnitude, axis, groups)
        kept = _kept_in_part(how, axis + 1, parts)
        return block_shapes.merge(kept, like=x)
    return _kept_in_part(how, axis, magnitude)


def _kept_in_part(how: config.NofM, axis: int, magnitude: jax.Array) -> jax.Array:
    shape = list(magnitude.shape)
    count = -(-shape[axis] // how.m)
    shape[axis] = count * how.m
    # Zeros behind all elements are kept after them.
    widths = [(0, new - old) for new, old in zip(shape, magnitude.shape, strict=True)]
    padded = jnp.pad(whole_where_uneven(magnitude, shape), widths)
    kept = largest(block_shapes.split_axis(padded, axis, count), axis + 1, how.n)
    kept = block_shapes.merge(kept, like=padded)
    return lax.slice_in_dim(kept, 0, magnitude.shape[axis], axis=axis)
