"""Conversions between float32 and floats of 8 bits, in integers on CPUs.

XLA:CPU converts float32 to 8 bits in some three times the instructions of all else that
rounds an element, as it rounds again, and back in twice those that are needed. Values
that are known to be those of the dtype take a shift, and an addition where the dtype is
subnormal.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering.elementwise import ElementwiseOnTarget

_SIGN, _MAGNITUDE = np.int32(-(2**31)), np.int32(2**31 - 1)
_BIAS, _MANTISSA_BITS = 127, 23


def narrowed(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Converts float32 to a float dtype that has all its values, exactly.

    Args:
        x: float32, of finite values of `dtype`.
        dtype: any float dtype.
    """
    return _Narrowed(np.dtype(dtype))(x)


def widened(x: jax.Array) -> jax.Array:
    """Converts an array of any dtype to float32; floats of 8 bits faster on CPUs.

    >>> widened(jnp.array([-448, 2.0**-9, jnp.nan], jnp.float8_e4m3fn)).tolist()
    [-448.0, 0.001953125, nan]
    """
    return x.astype(jnp.float32) if _format(x.dtype) is None else _WIDENED(x)


class _Format(NamedTuple):
    """A dtype of 8 bits: a sign, the exponent, and the mantissa."""

    mantissa_bits: int
    smallest: int
    """Exponent of the smallest normal value."""

    largest: int
    """Code of the largest finite value."""

    infinity: int | None
    """Code of infinity."""

    has_minus_zero: bool
    """Whether the code of minus zero is no NaN."""

    @property
    def below(self) -> np.float32:
        """Power of two below which values are subnormal."""
        return np.float32(2.0**self.smallest)

    @property
    def step(self) -> np.float32:
        """The smallest positive value."""
        return np.float32(2.0 ** (self.smallest - self.mantissa_bits))

    @property
    def shift(self) -> np.int32:
        """Difference of float32's mantissa in bits."""
        return np.int32(_MANTISSA_BITS - self.mantissa_bits)

    @property
    def offset(self) -> np.int32:
        """Difference of the biases of exponents, where codes of the dtype have them."""
        return np.int32((self.smallest - 1 + _BIAS) << self.mantissa_bits)


@functools.cache
def _format(dtype: np.dtype) -> _Format | None:
    """The format of a dtype; None if it is not one of 8 bits with a sign and zero."""
    if dtype.itemsize != 1 or not jnp.issubdtype(dtype, jnp.floating):
        return None
    values = np.arange(2**8, dtype=np.uint8).view(dtype).astype(np.float32)
    if values[0] != 0 or jnp.finfo(dtype).bits != 8:
        return None
    positive = values[: 2**7]
    infinities = np.flatnonzero(np.isinf(positive))
    return _Format(
        mantissa_bits=int(jnp.finfo(dtype).nmant),
        smallest=int(jnp.finfo(dtype).minexp),
        largest=int(np.flatnonzero(np.isfinite(positive))[-1]),
        infinity=int(infinities[0]) if infinities.size else None,
        has_minus_zero=bool(values[2**7] == 0),
    )


@dataclasses.dataclass(frozen=True)
class _Narrowed(ElementwiseOnTarget):
    """Float32 to a dtype that has its values."""

    dtype: np.dtype

    def reference(self, x):
        return lax.convert_element_type(x, self.dtype)

    def lowered(self, target, x):
        format_of = _format(self.dtype)
        if target.platform != "cpu" or format_of is None:
            return self.reference(x)
        bits = lax.bitcast_convert_type(x, jnp.int32)
        magnitude = lax.bitwise_and(bits, _MAGNITUDE)
        code = _code(format_of, magnitude)
        sign = lax.shift_right_logical(lax.bitwise_and(bits, _SIGN), np.int32(24))
        code = lax.convert_element_type(lax.bitwise_or(code, sign), jnp.uint8)
        return lax.bitcast_convert_type(code, self.dtype)


def _code(format_of: _Format, magnitude: jax.Array) -> jax.Array:
    """The exponent and mantissa of values whose bits are given, as int32."""
    shifted = lax.shift_right_logical(magnitude, format_of.shift)
    normal = lax.sub(shifted, format_of.offset)
    # Floats from 2^23 steps on are in the order of their bits, a step each.
    anchor = np.float32(2.0**_MANTISSA_BITS * format_of.step)
    steps = lax.add(lax.bitcast_convert_type(magnitude, jnp.float32), anchor)
    subnormal = lax.sub(lax.bitcast_convert_type(steps, jnp.int32), _bits(anchor))
    return lax.select(lax.lt(magnitude, _bits(format_of.below)), subnormal, normal)


@dataclasses.dataclass(frozen=True)
class _Widened(ElementwiseOnTarget):
    """Floats of 8 bits to float32."""

    def reference(self, x):
        return lax.convert_element_type(x, jnp.float32)

    def lowered(self, target, x):
        format_of = _format(x.dtype)
        if target.platform != "cpu" or format_of is None:
            return self.reference(x)
        bits = lax.bitcast_convert_type(x, jnp.int8)
        code = lax.convert_element_type(bits, jnp.int32)  # With its sign in front.
        magnitude = lax.bitwise_and(code, np.int32(2**7 - 1))
        sign = lax.bitwise_and(code, _SIGN)
        wide = lax.bitwise_or(_bits_of(format_of, magnitude), sign)
        if not format_of.has_minus_zero:
            nan = lax.full_like(wide, _bits(np.float32(np.nan)))
            wide = lax.select(lax.eq(code, np.int32(-(2**7))), nan, wide)
        return lax.bitcast_convert_type(wide, jnp.float32)


_WIDENED = _Widened()


def _bits_of(format_of: _Format, code: jax.Array) -> jax.Array:
    """The bits of the float32 of exponents and mantissas, int32."""
    normal = lax.shift_left(lax.add(code, format_of.offset), format_of.shift)
    steps = lax.convert_element_type(code, jnp.float32)
    subnormal = lax.bitcast_convert_type(lax.mul(steps, format_of.step), jnp.int32)
    is_subnormal = lax.lt(code, np.int32(2**format_of.mantissa_bits))
    wide = lax.select(is_subnormal, subnormal, normal)
    if format_of.largest == 2**7 - 1:
        return wide
    special = lax.full_like(wide, _bits(np.float32(np.nan)))
    if format_of.infinity is not None:
        infinity = lax.full_like(wide, _bits(np.float32(np.inf)))
        is_infinity = lax.eq(code, np.int32(format_of.infinity))
        special = lax.select(is_infinity, infinity, special)
    return lax.select(lax.gt(code, np.int32(format_of.largest)), special, wide)


def _bits(x: np.float32) -> np.int32:
    return np.int32(x.view(np.int32))
