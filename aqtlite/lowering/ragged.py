"""Ragged contractions of stored values and of floats, by the kind of both.

They follow those of `dot_general` (`integer`, `floating`, `narrow`), axes written as
`ragged_axes` writes them.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering import digits, exact, narrow, ragged_blocks
from aqtlite.lowering.target import TargetDependent
from aqtlite.shapes import ragged_axes
from aqtlite.shapes.ragged_axes import RaggedAxes


def integer_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    axes: RaggedAxes,
    largest: digits.Magnitudes = (None, None),
) -> jax.Array:
    """Contracts stored integers.

    Args:
        lhs: int4, int8, int16, or int32 up to `digits.LARGEST_OF_THREE`.
        rhs: the same.
        sizes: of the groups.
        axes: of both, and of the result.
        largest: the largest magnitudes in lhs and rhs; None for that of the dtype,
            without its minimum.

    Returns:
        The exact sums in int32 where int32 is certain to hold them. Otherwise float32:
        exact sums of pieces, or of digits, that int32 does hold, added there.
    """
    bounds = digits.magnitudes(lhs, rhs, largest)
    left, right = (
        _int8_stack(x, one) for x, one in zip((lhs, rhs), bounds, strict=True)
    )
    sums = _sums_of_stacks(left, right, sizes, axes, bounds)
    return digits.combine(digits.combine(sums, 1), 0)


def _int8_stack(x: jax.Array, largest: int) -> jax.Array:
    """Integers as a stack of one, or of as many digits as it takes."""
    if jnp.iinfo(x.dtype).bits <= 8:
        return x.astype(jnp.int8)[None]
    return digits.of_integers(x, 2 if largest <= digits.LARGEST_OF_TWO else 3)


def _sums_of_stacks(
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    axes: RaggedAxes,
    largest: tuple[int, int],
) -> jax.Array:
    """Contracts each digit of lhs with each of rhs.

    Args:
        lhs: int8, digits on a leading axis.
        rhs: the same.
        sizes: of the groups.
        axes: without those of digits.
        largest: the largest magnitudes of what the digits make together.

    Returns:
        ``(digits of lhs, digits of rhs, *axes.out)``: int32 where it holds the sums of
        digits, and what they make together; otherwise float32, of exact sums of pieces.
    """
    lhs_axis, rhs_axis = (1 + x.index(axes.contracted) for x in (axes.lhs, axes.rhs))
    size = lhs.shape[lhs_axis]
    # A symbolic size (jax.export) is taken to fit: it cannot be split.
    if not isinstance(size, int):
        return _dot_of_stacks(lhs, rhs, sizes, axes)
    of_digits = (
        digits.LARGEST if x.shape[0] > 1 else min(one, digits.LARGEST)
        for x, one in zip((lhs, rhs), largest, strict=True)
    )
    count = max(1, -(-size // ((2**31 - 1) // math.prod(of_digits))))
    step = max(1, -(-size // count))
    parts = []
    for start in range(0, max(1, size), step):
        stop, inside = min(start + step, size), sizes
        if axes.contracted == "m" and count > 1:
            inside = ragged_axes.sizes_between(sizes, start, stop)
        left = lax.slice_in_dim(lhs, start, stop, axis=lhs_axis)
        right = lax.slice_in_dim(rhs, start, stop, axis=rhs_axis)
        part = _dot_of_stacks(left, right, inside, axes)
        is_wide = size * math.prod(largest) >= 2**31
        parts.append(part.astype(jnp.float32) if is_wide else part)
    return sum(parts[1:], start=parts[0])


def _dot_of_stacks(
    lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, axes: RaggedAxes
) -> jax.Array:
    """Contracts each of a stack of lhs with each of a stack of rhs.

    Returns:
        Two new leading axes, of lhs's stack and of rhs's.
    """
    if "m" not in axes.out:
        if axes.lhs[1] != axes.out[1]:
            return _dot_of_stacks(rhs, lhs, sizes, axes.exchanged()).swapaxes(0, 1)
        left, right = _side_by_side(lhs, 1), _side_by_side(rhs, 1)
        sums = ragged_blocks.group_sums(left, right, sizes)
        stacks = (lhs.shape[0], lhs.shape[2]), (rhs.shape[0], rhs.shape[2])
        sums = sums.reshape(sums.shape[0], *stacks[0], *stacks[1])
        return sums.transpose(1, 3, 0, 2, 4)
    if "m" in axes.rhs:
        return _dot_of_stacks(rhs, lhs, sizes, axes.exchanged()).swapaxes(0, 1)
    contracted = axes.rhs.index(axes.contracted)
    count, column = rhs.shape[0], 3 - contracted
    columns = rhs.shape[1 + column]
    matrices = _side_by_side(rhs, column)
    sums = ragged_blocks.row_products(lhs, matrices, sizes, contracted)
    return sums.reshape(*sums.shape[:2], count, columns).transpose(0, 2, 1, 3)


def _side_by_side(stack: jax.Array, axis: int) -> jax.Array:
    """Joins what is stacked along an axis of its elements."""
    moved = jnp.moveaxis(stack, 0, axis)
    shape = stack.shape[1:]
    joined = (*shape[:axis], stack.shape[0] * shape[axis], *shape[axis + 1 :])
    return moved.reshape(joined)


def float_dot(
    lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, axes: RaggedAxes
) -> jax.Array:
    """Contracts floats, summed in float32 or in what is wider."""
    dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
    one, other = (x.astype(dtype)[None] for x in (lhs, rhs))
    return _dot_of_stacks(one, other, sizes, axes)[0, 0]


def integer_dot_in_float(
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    axes: RaggedAxes,
    in_dtype: np.dtype,
    largest: digits.Magnitudes = (None, None),
) -> jax.Array:
    """Contracts stored integers as values of a float dtype, to float32.

    A CPU contracts the integers, whose sums the float contraction approaches.
    """
    return _IntegerDotInFloat(axes, in_dtype, largest)(lhs, rhs, sizes)


@dataclasses.dataclass(frozen=True)
class _IntegerDotInFloat(TargetDependent):
    """A contraction of integers as floats of a dtype that holds them exactly."""

    axes: RaggedAxes
    in_dtype: np.dtype
    largest: digits.Magnitudes

    def reference(self, lhs, rhs, sizes):
        lhs, rhs = lhs.astype(self.in_dtype), rhs.astype(self.in_dtype)
        return float_dot(lhs, rhs, sizes, self.axes).astype(jnp.float32)

    def lowered(self, target, lhs, rhs, sizes):
        if target.platform != "cpu":
            return self.reference(lhs, rhs, sizes)
        sums = integer_dot(lhs, rhs, sizes, self.axes, self.largest)
        return sums.astype(jnp.float32)


def mixed_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    axes: RaggedAxes,
    out_dtype: np.dtype,
    largest: digits.Magnitudes = (None, None),
) -> jax.Array:
    """Contracts floats with stored integers, to float32.

    On CPUs the floats are taken apart into int8 digits, as in `floating.mixed_dot`.

    Args:
        lhs: floating, or stored integers.
        rhs: the other.
        sizes: of the groups.
        axes: of both, and of the result.
        out_dtype: in which the result is wanted in the end.
        largest: the largest magnitude of the integers, in their place; None for that
            of their dtype.
    """
    return _MixedDot(axes, np.dtype(out_dtype), largest)(lhs, rhs, sizes)


@dataclasses.dataclass(frozen=True)
class _MixedDot(TargetDependent):
    """A contraction of floats with integers."""

    axes: RaggedAxes
    out_dtype: np.dtype
    largest: digits.Magnitudes

    def reference(self, lhs, rhs, sizes):
        dtype = lhs.dtype if jnp.issubdtype(lhs.dtype, jnp.floating) else rhs.dtype
        lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
        return float_dot(lhs, rhs, sizes, self.axes).astype(jnp.float32)

    def lowered(self, target, lhs, rhs, sizes):
        if target.platform != "cpu":
            return self.reference(lhs, rhs, sizes)
        is_lhs = jnp.issubdtype(lhs.dtype, jnp.floating)
        floats, letters = (lhs, self.axes.lhs) if is_lhs else (rhs, self.axes.rhs)
        axis = letters.index(self.axes.contracted)
        stack, unit = digits.of_floats(
            floats, (axis,), digits.count_for(floats, self.out_dtype)
        )
        integers, bound = (rhs, self.largest[1]) if is_lhs else (lhs, self.largest[0])
        if bound is None:
            bound = int(jnp.iinfo(integers.dtype).max)
        others = _int8_stack(integers, bound)
        # The digits of the floats stay apart, those of the integers are put together.
        bounds = (digits.LARGEST, bound) if is_lhs else (bound, digits.LARGEST)
        pair = (stack, others) if is_lhs else (others, stack)
        sums = _sums_of_stacks(*pair, sizes, self.axes, bounds)
        sums = digits.combine(sums, 1 if is_lhs else 0).astype(jnp.float32)
        rows = lhs.shape[0] if self.axes.lhs[0] == "m" else rhs.shape[0]
        unit = ragged_axes.laid_out(unit, letters, self.axes.out, sizes, rows)
        return digits.combine(sums, 0) * unit


def narrow_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    axes: RaggedAxes,
    units: narrow.Units = (None, None),
    largest: digits.Magnitudes = (None, None),
) -> jax.Array:
    """Contracts floats of 8 bits, summed in float32.

    bfloat16 and float32 hold them exactly. CPUs contract small multiples of a unit as
    integers, whose sums are exact.

    Args:
        lhs: float8 of any kind.
        rhs: the same, or of another kind.
        sizes: of the groups.
        axes: of both, and of the result.
        units: the powers of two of which the values of lhs and rhs are multiples; None
            for unknown.
        largest: the largest magnitudes, in units.
    """
    integers = narrow.units_of_integers(units, largest)
    return _NarrowDot(axes, integers, largest)(lhs, rhs, sizes)


@dataclasses.dataclass(frozen=True)
class _NarrowDot(TargetDependent):
    """A contraction of floats of 8 bits."""

    axes: RaggedAxes
    units: tuple[float, float] | None
    """None unless int8 holds all values, in units."""

    largest: digits.Magnitudes

    def reference(self, lhs, rhs, sizes):
        lhs, rhs = lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16)
        return float_dot(lhs, rhs, sizes, self.axes)

    def lowered(self, target, lhs, rhs, sizes):
        if target.platform != "cpu":
            return self.reference(lhs, rhs, sizes)
        lhs, rhs = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
        if self.units is None:
            lhs, rhs = exact.fusion_barrier(lhs), exact.fusion_barrier(rhs)
            return float_dot(lhs, rhs, sizes, self.axes)
        return narrow.as_integers(
            lhs,
            rhs,
            self.units,
            lambda a, b: integer_dot(a, b, sizes, self.axes, self.largest),
        )
