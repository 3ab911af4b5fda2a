"""Masks: which elements of a value are of tokens that count.

A mask has the rank of its value, and size one along axes on which it does not depend.
None stands for a value of which all elements count.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from aqtlite.jaxpr.axes import reshapes


@dataclasses.dataclass(frozen=True)
class Lost:
    """Stands for a mask that could not be followed."""

    why: str
    """The operation that lost it."""


Mask = jax.Array | Lost | None


def full(mask: jax.Array | None, shape: Sequence[int]) -> jax.Array:
    """Returns a mask of a shape to which it broadcasts."""
    if mask is None:
        return jnp.ones(shape, bool)
    return jnp.broadcast_to(mask, shape)


def all_of(masks: Sequence[jax.Array | None]) -> jax.Array | None:
    """Returns where all masks, of one rank, are True."""
    found: jax.Array | None = None
    for mask in masks:
        if found is None:
            found = mask
        elif mask is not None and mask is not found:
            found = jnp.logical_and(found, mask)
    return found


def any_along(mask: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Returns where a mask is True anywhere along axes, keepdims."""
    long = tuple(axis for axis in axes if mask.shape[axis] != 1)
    return jnp.any(mask, long, keepdims=True) if long else mask


def placed(mask: jax.Array, axes: Sequence[int], ndim: int) -> jax.Array:
    """Returns a mask with its axes at places among those of an array.

    Args:
        mask: the mask.
        axes: the axis of the array for each axis of the mask.
        ndim: rank of the array.
    """
    order = sorted(range(mask.ndim), key=lambda i: axes[i])
    shape = [1] * ndim
    for i in order:
        shape[axes[i]] = mask.shape[i]
    return mask.transpose(order).reshape(shape)


def without_axes(mask: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Returns `any_along` axes, without these axes."""
    kept = [size for axis, size in enumerate(mask.shape) if axis not in axes]
    return any_along(mask, axes).reshape(kept)


def reshaped(mask: jax.Array, before: Sequence[int], after: Sequence[int]) -> jax.Array:
    """Returns the mask of a reshaped value.

    Axes on which the mask does not depend keep size one, unless they are merged with
    others.

    Args:
        mask: mask of the value before.
        before: shape of the value before.
        after: shape of the value after.
    """
    if 0 in before:
        return jnp.ones(after, bool)
    sizes, result = [1] * len(before), [1] * len(after)
    for old, new in reshapes.runs(before, after):
        if any(mask.shape[axis] != 1 for axis in old):
            for axis in old:
                sizes[axis] = before[axis]
            for axis in new:
                result[axis] = after[axis]
    return jnp.broadcast_to(mask, sizes).reshape(result)
