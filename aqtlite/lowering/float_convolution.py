"""Convolutions in floating point: of floats, of floats with integers, of integers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from aqtlite.lowering import digits, exact, narrow
from aqtlite.lowering.convolution import Convolution
from aqtlite.lowering.integer_convolution import integer_conv
from aqtlite.lowering.target import TargetDependent


def float_conv(
    lhs: jax.Array,
    rhs: jax.Array,
    convolution: Convolution,
    *,
    out_sharding: NamedSharding | None = None,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Convolves floats, summed in float32 or in what is wider."""
    dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
    run = _FloatConvolution(convolution, out_sharding, precision)
    return run(lhs.astype(dtype), rhs.astype(dtype))


@dataclasses.dataclass(frozen=True)
class _FloatConvolution(TargetDependent):
    """A convolution of floats of one dtype."""

    convolution: Convolution
    out_sharding: NamedSharding | None
    precision: lax.PrecisionLike

    def reference(self, lhs, rhs):
        wide = jnp.promote_types(lhs.dtype, jnp.float32)
        if 0 in (*lhs.shape, *rhs.shape):
            return jnp.zeros(self.convolution.output_shape(lhs.shape, rhs.shape), wide)
        return self.convolution(lhs, rhs, wide, self.out_sharding, self.precision)

    def lowered(self, target, lhs, rhs):
        if target.platform != "cpu":
            return self.reference(lhs, rhs)
        wide = jnp.promote_types(lhs.dtype, jnp.float32)
        return self.reference(lhs.astype(wide), rhs.astype(wide))


def integer_conv_in_float(
    lhs: jax.Array,
    rhs: jax.Array,
    convolution: Convolution,
    *,
    in_dtype: np.dtype,
    largest: digits.Magnitudes = (None, None),
    out_sharding: NamedSharding | None = None,
) -> jax.Array:
    """Convolves stored integers as values of a float dtype, to float32.

    A CPU convolves the integers: their sums are those that the float convolution
    approaches, the same in every program, and sooner there.
    """
    run = _IntegerConvolutionInFloat(convolution, in_dtype, largest, out_sharding)
    return run(lhs, rhs)


@dataclasses.dataclass(frozen=True)
class _IntegerConvolutionInFloat(TargetDependent):
    """A convolution of integers as floats of a dtype that holds them exactly."""

    convolution: Convolution
    in_dtype: np.dtype
    largest: digits.Magnitudes
    out_sharding: NamedSharding | None

    def reference(self, lhs, rhs):
        lhs, rhs = lhs.astype(self.in_dtype), rhs.astype(self.in_dtype)
        out = float_conv(lhs, rhs, self.convolution, out_sharding=self.out_sharding)
        return out.astype(jnp.float32)

    def lowered(self, target, lhs, rhs):
        if target.platform != "cpu":
            return self.reference(lhs, rhs)
        sums = integer_conv(
            lhs,
            rhs,
            self.convolution,
            largest=self.largest,
            out_sharding=self.out_sharding,
        )
        return sums.astype(jnp.float32)


def mixed_conv(
    lhs: jax.Array,
    rhs: jax.Array,
    convolution: Convolution,
    *,
    out_dtype: np.dtype,
    out_sharding: NamedSharding | None = None,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Convolves floats with stored integers, to float32.

    On CPUs the floats are taken apart into int8 digits with one unit for the array,
    three of them, or two where both they and the result are of 16 bits. The sums are
    then the same in every program, which a float convolution's are not. Elsewhere the
    integers are widened.

    Args:
        lhs: floating, or stored integers.
        rhs: the other.
        convolution: the convolution.
        out_dtype: in which the result is wanted in the end.
        out_sharding: of the result.
        precision: of a convolution of floats; sums of digits have that of float32.
    """
    run = _MixedConvolution(convolution, np.dtype(out_dtype), out_sharding, precision)
    return run(lhs, rhs)


@dataclasses.dataclass(frozen=True)
class _MixedConvolution(TargetDependent):
    """A convolution of floats with integers."""

    convolution: Convolution
    out_dtype: np.dtype
    out_sharding: NamedSharding | None
    precision: lax.PrecisionLike

    def reference(self, lhs, rhs):
        dtype = lhs.dtype if jnp.issubdtype(lhs.dtype, jnp.floating) else rhs.dtype
        lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
        out = float_conv(
            lhs,
            rhs,
            self.convolution,
            out_sharding=self.out_sharding,
            precision=self.precision,
        )
        return out.astype(jnp.float32)

    def lowered(self, target, lhs, rhs):
        if target.platform != "cpu":
            return self.reference(lhs, rhs)
        is_lhs = jnp.issubdtype(lhs.dtype, jnp.floating)
        floats = lhs if is_lhs else rhs
        axes = self._unit_axes(floats.ndim, is_lhs=is_lhs)
        stack, unit = digits.of_floats(
            floats, axes, digits.count_for(floats, self.out_dtype)
        )
        largest = (digits.LARGEST, None) if is_lhs else (None, digits.LARGEST)
        sums = [
            integer_conv(
                digit if is_lhs else lhs,
                rhs if is_lhs else digit,
                self.convolution,
                largest=largest,
                out_sharding=self.out_sharding,
            ).astype(jnp.float32)
            for digit in stack
        ]
        return digits.combine(jnp.stack(sums), 0) * self._on_output(unit, is_lhs=is_lhs)

    def _unit_axes(self, ndim: int, *, is_lhs: bool) -> tuple[int, ...]:
        """The axes along which floats share a unit: all but what the result has."""
        kept = self._kept(is_lhs=is_lhs)
        return tuple(axis for axis in range(ndim) if axis != kept)

    def _kept(self, *, is_lhs: bool) -> int | None:
        """The axis of an operand that is one of the result's; None with groups."""
        of = self.convolution
        if is_lhs:
            return None if of.batch_groups > 1 else of.lhs_spec[0]
        return of.rhs_spec[0]

    def _on_output(self, unit, *, is_lhs: bool):
        kept = self._kept(is_lhs=is_lhs)
        shape = [1] * unit.ndim
        if kept is not None:
            shape[self.convolution.out_spec[0 if is_lhs else 1]] = unit.shape[kept]
        return unit.reshape(shape)


def narrow_conv(
    lhs: jax.Array,
    rhs: jax.Array,
    convolution: Convolution,
    *,
    units: narrow.Units = (None, None),
    largest: digits.Magnitudes = (None, None),
    out_sharding: NamedSharding | None = None,
) -> jax.Array:
    """Convolves floats of 8 bits, summed in float32.

    CPUs convolve small multiples of a unit as integers, whose sums are exact, and other
    floats in float32; GPUs and TPUs in bfloat16. Both hold them exactly.

    Args:
        lhs: float8 of any kind.
        rhs: the same, or of another kind.
        convolution: the convolution.
        units: the powers of two of which the values of lhs and rhs are multiples; None
            for unknown.
        largest: the largest magnitudes, in units.
        out_sharding: of the result.
    """
    integers = narrow.units_of_integers(units, largest)
    return _NarrowConvolution(convolution, integers, largest, out_sharding)(lhs, rhs)


@dataclasses.dataclass(frozen=True)
class _NarrowConvolution(TargetDependent):
    """A convolution of floats of 8 bits."""

    convolution: Convolution
    units: tuple[float, float] | None
    """None unless int8 holds all values, in units."""

    largest: digits.Magnitudes
    out_sharding: NamedSharding | None

    def reference(self, lhs, rhs):
        lhs, rhs = lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16)
        return float_conv(lhs, rhs, self.convolution, out_sharding=self.out_sharding)

    def lowered(self, target, lhs, rhs):
        if target.platform != "cpu":
            return self.reference(lhs, rhs)
        if self.units is None:
            lhs, rhs = (exact.fusion_barrier(x.astype(jnp.float32)) for x in (lhs, rhs))
            return float_conv(
                lhs, rhs, self.convolution, out_sharding=self.out_sharding
            )
        run = functools.partial(
            integer_conv,
            convolution=self.convolution,
            largest=self.largest,
            out_sharding=self.out_sharding,
        )
        return narrow.as_integers(lhs, rhs, self.units, run)
