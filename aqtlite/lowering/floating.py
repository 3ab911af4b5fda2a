"""Contractions in floating point: of floats, and of integers as floats."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from aqtlite.lowering import cpu, plain
from aqtlite.lowering.integer import integer_dot
from aqtlite.lowering.target import TargetDependent
from aqtlite.shapes import dimension_numbers as dn
from aqtlite.shapes.sharding import before_transposition


def float_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    dims: dn.DimensionNumbers,
    order: dn.Axes | None = None,
    out_sharding: NamedSharding | None = None,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Contracts floats, summed in float32 or in what is wider."""
    dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
    lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
    if order is not None:
        out_sharding = before_transposition(out_sharding, order)
    dot = _FloatDot(dims, out_sharding, precision)
    form = dot.reference if cpu.sums_halves(lhs, rhs, dims) else dot
    out = form(lhs, rhs)
    return out if order is None else out.transpose(order)


@dataclasses.dataclass(frozen=True)
class _FloatDot(TargetDependent):
    """A contraction of floats of one dtype."""

    dims: dn.DimensionNumbers
    out_sharding: NamedSharding | None
    precision: lax.PrecisionLike

    def reference(self, lhs, rhs):
        accumulator = jnp.promote_types(lhs.dtype, jnp.float32)
        return plain.dot(
            lhs, rhs, self.dims, accumulator, self.out_sharding, self.precision
        )

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
