"""Reductions that CPUs fuse with the computation of their operand.

XLA:CPU fuses a reduction of integers with its operand only if it has few terms, and a
reduction of floats never: otherwise the operand is written to memory first. Reducing in
two steps, the first with few terms, avoids that. Results equal those of one step, bit
for bit.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering.elementwise import Elementwise
from aqtlite.lowering.target import OnCpu
from aqtlite.shapes.sharding import explicit_sharding

# LLVM unrolls, and then vectorizes, a loop over this many terms; it gives up on 16
# terms that take long to compute.
_TERMS = 8
_WORTHWHILE = 2**6  # elements

# XLA:CPU reduces longer axes in two kernels ("tree_reduction_rewriter").
_LONGEST = 32


def largest_magnitude(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Computes ``max(|x|)`` over some axes, keepdims; 0 over an empty axis.

    A NaN makes its maximum NaN or, on CPUs, infinite.
    """
    return _LargestMagnitude(tuple(axes), explicit_sharding(x) is None)(x)


@dataclasses.dataclass(frozen=True)
class _LargestMagnitude(OnCpu):
    """The largest magnitude over some axes."""

    axes: tuple[int, ...]
    can_be_cut: bool
    """Whether axes can be cut; not with an explicit sharding."""

    def type_of(self, x):
        shape = (1 if i in self.axes else n for i, n in enumerate(x.shape))
        return x.update(shape=tuple(shape), weak_type=False)

    def reference(self, x):
        return jnp.max(jnp.abs(x), axis=self.axes, keepdims=True, initial=0.0)

    def on_cpu(self, is_whole, x):
        # XLA:CPU's maximum of floats ignores NaN. Non-negative floats are in the order
        # of their bits, with NaN last.
        bits = _MAGNITUDE_BITS(x)
        cut = _cut(x, self.axes) if self.can_be_cut else None
        if cut is None or not is_whole:
            return lax.bitcast_convert_type(_largest(bits, self.axes), jnp.float32)
        axis, terms = cut
        if x.shape[axis] == x.size:
            pieces = lax.reshape(bits, (terms, *_short_axes(x.size // terms)))
            first = _MAGNITUDES_OR_INFINITY(lax.reduce_max(pieces, (0,)))
            return lax.reshape(_largest(first, range(first.ndim)), (1,) * x.ndim)
        first = lax.reduce_max(_in_pieces(bits, axis, terms), (axis,))
        return _largest(_MAGNITUDES_OR_INFINITY(first), self.axes)


def _magnitude_bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(lax.abs(x), jnp.int32)


def _magnitudes_or_infinity(bits: jax.Array) -> jax.Array:
    infinity = np.float32(np.inf).view(np.int32)
    return lax.bitcast_convert_type(lax.min(bits, infinity), jnp.float32)


_MAGNITUDE_BITS = Elementwise(_magnitude_bits)
_MAGNITUDES_OR_INFINITY = Elementwise(_magnitudes_or_infinity)


def _largest(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """The largest of non-negative numbers, keepdims."""
    largest = lax.reduce(x, np.zeros((), x.dtype), lax.max, tuple(axes))
    return lax.expand_dims(largest, axes)


def _cut(x: jax.Array, axes: Iterable[int]) -> tuple[int, int] | None:
    """The axis to cut in the first step, and its number of terms; None for one step."""
    is_known = all(isinstance(size, int) for size in x.shape)
    if not is_known or math.prod(x.shape) < _WORTHWHILE:
        return None
    cuts = [
        (terms, x.shape[axis], axis)
        for axis in axes
        for terms in (_TERMS, _TERMS // 2)
        if x.shape[axis] % terms == 0
    ]
    if not cuts:
        return None
    terms, _, axis = max(cuts)
    return axis, terms


def _short_axes(size: int) -> tuple[int, ...]:
    """Splits an axis in two that one kernel reduces; none where that is impossible."""
    fitting = (n for n in range(-(-size // _LONGEST), _LONGEST + 1) if size % n == 0)
    first = next(fitting, 1) if size else 1
    return (first, size // first)


def _in_pieces(x: jax.Array, axis: int, terms: int) -> jax.Array:
    """Splits an axis into ``(terms, size / terms)``."""
    pieces = (terms, x.shape[axis] // terms)
    return lax.reshape(x, (*x.shape[:axis], *pieces, *x.shape[axis + 1 :]))
