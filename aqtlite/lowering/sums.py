"""Sums in an order that depends on nothing but the number of an element.

An axis is filled up to a power of two and halved, ``x[:n / 2] + x[n / 2:]``, until one
element is left. More filling adds zeros; elements that are shifted or rotated by any
distance meet in the same sums, by their distances modulo powers of two. So neither
padding nor the place in a cache changes a bit, and each step is a long vector.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering.target import TargetDependent
from aqtlite.shapes.sharding import replicated_along


@dataclasses.dataclass(frozen=True)
class Sum(TargetDependent):
    """Sum of float32 along axes, which are dropped."""

    axes: tuple[int, ...]

    def reference(self, x):
        return jnp.sum(x, self.axes)

    def lowered(self, target, x):
        del target
        x = replicated_along(x, self.axes)
        for axis in sorted(self.axes, reverse=True):
            x = _halved(x, axis)
        return x


@dataclasses.dataclass(frozen=True)
class CumulativeSum(TargetDependent):
    """Cumulative sum of float32 along an axis.

    An element is the sum of the blocks of its number's binary digits, from the left,
    however many elements follow.
    """

    axis: int
    reverse: bool

    def reference(self, x):
        return lax.cumsum(x, self.axis, self.reverse)

    def lowered(self, target, x):
        del target
        return lax.associative_scan(lax.add, x, reverse=self.reverse, axis=self.axis)


@dataclasses.dataclass(frozen=True)
class WindowedSum(TargetDependent):
    """`jax.lax.reduce_window` of float32 with `jax.lax.add`, as in average pooling.

    The elements of a window are added from its first one, axis by axis.
    """

    window_dimensions: tuple[int, ...]
    window_strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    base_dilation: tuple[int, ...]
    window_dilation: tuple[int, ...]

    def reference(self, x):
        options = dataclasses.asdict(self)
        return lax.reduce_window(x, np.float32(0), lax.add, **options)

    def lowered(self, target, x):
        del target
        padding = (
            (*sides, dilation - 1)
            for sides, dilation in zip(self.padding, self.base_dilation, strict=True)
        )
        x = lax.pad(x, np.float32(-0.0), list(padding))
        for axis, size in enumerate(self.window_dimensions):
            x = self._summed(x, axis, size)
        return x

    def _summed(self, x, axis, size):
        dilation, stride = self.window_dilation[axis], self.window_strides[axis]
        end = x.shape[axis] - dilation * (size - 1)
        if end < 1:
            return lax.slice_in_dim(x, 0, 0, axis=axis)
        out = lax.slice_in_dim(x, 0, end, stride, axis)
        for start in range(dilation, dilation * size, dilation):
            out = out + lax.slice_in_dim(x, start, start + end, stride, axis)
        return out


def _halved(x: jax.Array, axis: int) -> jax.Array:
    size = x.shape[axis]
    if size == 0:
        return jnp.sum(x, axis)
    count = 1 << (size - 1).bit_length()
    if count != size:
        padding = [(0, 0, 0)] * x.ndim
        padding[axis] = (0, count - size, 0)
        # Unlike 0.0, it changes no element that it is added to.
        x = lax.pad(x, np.float32(-0.0), padding)
    while count > 1:
        count //= 2
        first = lax.slice_in_dim(x, 0, count, axis=axis)
        x = first + lax.slice_in_dim(x, count, None, axis=axis)
    return lax.squeeze(x, (axis,))
