"""Contractions in floating point: of floats, of floats with integers, of integers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from aqtlite import dimension_numbers as dn
from aqtlite.lowering import cpu, digits, plain
from aqtlite.lowering.integer import integer_dot, with_new_axes
from aqtlite.lowering.target import TargetDependent
from aqtlite.sharding import before_transposition


def float_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    dims: dn.DimensionNumbers,
    order: dn.Axes | None = None,
    out_sharding: NamedSharding | None = None,
) -> jax.Array:
    """Contracts floats, summed in float32 or in what is wider."""
    dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
    lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
    if order is not None:
        out_sharding = before_transposition(out_sharding, order)
    dot = _FloatDot(dims, out_sharding)
    form = dot.reference if cpu.sums_halves(lhs, rhs, dims) else dot
    out = form(lhs, rhs)
    return out if order is None else out.transpose(order)


@dataclasses.dataclass(frozen=True)
class _FloatDot(TargetDependent):
    """A contraction of floats of one dtype."""

    dims: dn.DimensionNumbers
    out_sharding: NamedSharding | None

    def reference(self, lhs, rhs):
        accumulator = jnp.promote_types(lhs.dtype, jnp.float32)
        return plain.dot(lhs, rhs, self.dims, accumulator, self.out_sharding)

    def lowered(self, target, lhs, rhs):
        if target.platform != "cpu":
            return self.reference(lhs, rhs)
        accumulator = jnp.promote_types(lhs.dtype, jnp.float32)
        return self.reference(lhs.astype(accumulator), rhs.astype(accumulator))


def integer_dot_in_float(
    lhs: jax.Array,
    rhs: jax.Array,
    dims: dn.DimensionNumbers,
    in_dtype: np.dtype,
    order: dn.Axes | None = None,
    out_sharding: NamedSharding | None = None,
    largest: tuple[int | None, int | None] = (None, None),
) -> jax.Array:
    """Contracts stored integers as values of a float dtype, to float32.

    A CPU contracts the integers: their sums are those that the float contraction
    approaches, the same in every program, and sooner there.
    """
    return _IntegerDotInFloat(dims, in_dtype, order, out_sharding, largest)(lhs, rhs)


@dataclasses.dataclass(frozen=True)
class _IntegerDotInFloat(TargetDependent):
    """A contraction of integers as floats of a dtype that holds them exactly."""

    dims: dn.DimensionNumbers
    in_dtype: np.dtype
    order: dn.Axes | None
    out_sharding: NamedSharding | None
    largest: tuple[int | None, int | None]

    def reference(self, lhs, rhs):
        lhs, rhs = lhs.astype(self.in_dtype), rhs.astype(self.in_dtype)
        out = float_dot(lhs, rhs, self.dims, self.order, self.out_sharding)
        return out.astype(jnp.float32)

    def lowered(self, target, lhs, rhs):
        if target.platform != "cpu":
            return self.reference(lhs, rhs)
        sums = integer_dot(
            lhs, rhs, self.dims, self.order, self.out_sharding, self.largest
        )
        return sums.astype(jnp.float32)


def mixed_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    dims: dn.DimensionNumbers,
    order: dn.Axes | None = None,
    out_sharding: NamedSharding | None = None,
    *,
    out_dtype: np.dtype,
) -> jax.Array:
    """Contracts floats with stored integers, to float32.

    On CPUs the floats are taken apart into three int8 digits, or two where both they
    and the result are of 16 bits (`digits.of_floats`): three int8 contractions take
    less time than a float one that widens integers, and their sums are the same in
    every program, which a float contraction's are not. Elsewhere the integers are
    widened, which compilers fuse with the contraction.

    Args:
        lhs: floating, or stored integers.
        rhs: the other.
        dims: canonical dimension numbers.
        order: a permutation of the axes of `lax.dot_general`'s result.
        out_sharding: of the permuted result.
        out_dtype: in which the result is wanted in the end.
    """
    return _MixedDot(dims, order, out_sharding, np.dtype(out_dtype))(lhs, rhs)


@dataclasses.dataclass(frozen=True)
class _MixedDot(TargetDependent):
    """A contraction of floats with integers."""

    dims: dn.DimensionNumbers
    order: dn.Axes | None
    out_sharding: NamedSharding | None
    out_dtype: np.dtype

    def reference(self, lhs, rhs):
        dtype = lhs.dtype if jnp.issubdtype(lhs.dtype, jnp.floating) else rhs.dtype
        lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
        out = float_dot(lhs, rhs, self.dims, self.order, self.out_sharding)
        return out.astype(jnp.float32)

    def lowered(self, target, lhs, rhs):
        if target.platform != "cpu":
            return self.reference(lhs, rhs)
        return _dot_of_digits(
            lhs, rhs, self.dims, self.order, self.out_sharding, self.out_dtype
        )


def _dot_of_digits(lhs, rhs, dims, order, out_sharding, out_dtype):
    batch, lhs_rank = len(dims[1][0]), lhs.ndim - len(dims[0][0])
    is_lhs = jnp.issubdtype(lhs.dtype, jnp.floating)
    floats = lhs if is_lhs else rhs
    is_half = jnp.finfo(floats.dtype).bits == jnp.finfo(out_dtype).bits == 16
    axes = dims[0][0 if is_lhs else 1]
    stack, unit = digits.of_floats(floats, axes, 2 if is_half else 3)
    if order is not None and out_sharding is not None:
        out_sharding = before_transposition(out_sharding, order)
    axis = batch if is_lhs else lhs_rank
    if out_sharding is not None:
        out_sharding = with_new_axes(out_sharding, axis)
    if is_lhs:
        lhs, stacked = stack, digits.stacked_dims(dims, lhs=1)
        unit = dn.lhs_scale_to_output(unit, dims, rhs.ndim)
    else:
        rhs, stacked = stack, digits.stacked_dims(dims, rhs=1)
        unit = dn.rhs_scale_to_output(unit, dims, lhs.ndim)
    largest = (digits.LARGEST, None) if is_lhs else (None, digits.LARGEST)
    sums = integer_dot(lhs, rhs, stacked, None, out_sharding, largest)
    out = digits.combine(sums.astype(jnp.float32), axis) * unit
    return out if order is None else out.transpose(order)
