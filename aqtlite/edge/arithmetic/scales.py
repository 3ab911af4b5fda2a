"""Factors computed from scales, with the same bits for concrete and traced scales.

Scales of weights are traced when a model is trained with `edge.fake_quantize`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.edge.arithmetic import fixed_point
from aqtlite.lowering import exact, fusion


def factor(x: Any, y: Any, divisor: Any) -> Any:
    """``x * y / divisor`` in float32, rounded twice.

    Args:
        x: float32, positive.
        y: float32, positive, of a shape that broadcasts with x.
        divisor: float32, positive.
    """
    if fixed_point.namespace(x, y, divisor) is np:
        return np.float32(x) * y / np.float32(divisor)
    product = exact.algebraic_barrier(jnp.asarray(x, jnp.float32) * y)
    # XLA multiplies by the reciprocal of a constant divisor: make it not a constant.
    return product / (divisor + product * np.float32(0))


def fixed_factor(x: Any, y: Any, divisor: Any) -> tuple[Any, Any]:
    """`fixed_point.quantized_multiplier` of ``float64(x) * y / divisor``.

    For tracers, the quotient is computed by long division of integers, since JAX has no
    float64 by default.

    Args:
        x: float32, positive.
        y: float32, positive, of a shape that broadcasts with x.
        divisor: float32, positive.

    >>> fixed_factor(*map(np.float32, (1.5, 0.25, 0.5)))
    (array(1610612736, dtype=int32), array(0, dtype=int32))
    >>> multiplier, shift = jax.jit(fixed_factor)(1.5, 0.25, 0.5)
    >>> int(multiplier), int(shift)
    (1610612736, 0)
    """
    if fixed_point.namespace(x, y, divisor) is np:
        real = np.float64(x) * y / np.float64(divisor)
        return fixed_point.quantized_multiplier(real)
    return _computed_fixed_factor(x, y, divisor)


@jax.jit
def _computed_fixed_factor(
    x: jax.Array, y: jax.Array, divisor: jax.Array
) -> tuple[jax.Array, jax.Array]:
    (x, of_x), (y, of_y), (divisor, of_divisor) = map(_mantissa, (x, y, divisor))
    high, low = fixed_point.product(x, y)
    divisor = divisor.astype(jnp.uint32)
    # Long division in digits of 8 bits, after the high 24 of 48 bits.
    whole, rest = _divided((high.astype(jnp.uint32) << 8) | (low >> 24), divisor)
    for place in (16, 8, 0):
        digit, rest = _divided((rest << 8) | ((low >> place) & 255), divisor)
        whole = (whole << 8) | digit
    fraction = jnp.zeros_like(whole)
    for _ in range(4):
        digit, rest = _divided(rest << 8, divisor)
        fraction = (fraction << 8) | digit
    bits = 23 + (whole >> 23 > 0).astype(jnp.uint32) + (whole >> 24 > 0)
    # Rounding to float64 first turns fractions less than 2**-23 below 1/2 into 1/2.
    sums = fraction + (jnp.uint32(1) << bits) + (jnp.uint32(1) << (bits - 22))
    whole += sums < fraction
    fixed = (whole << (31 - bits)) | (sums >> (bits + 1))
    carries = fixed >> 31
    exponent = of_x + of_y - of_divisor - 24
    shift = exponent + (bits + carries).astype(jnp.int32)
    vanishes = shift < -31
    fixed = (fixed >> carries).astype(jnp.int32)
    # Without the barrier, XLA would fuse the division and repeat it for each element.
    both = jnp.where(vanishes, 0, jnp.stack(jnp.broadcast_arrays(fixed, shift)))
    fixed, shift = fusion.barrier(both)
    return fixed, shift


def _divided(x: jax.Array, divisor: jax.Array) -> tuple[jax.Array, jax.Array]:
    quotient = x // divisor
    return quotient, x - quotient * divisor


def _mantissa(x: Any) -> tuple[jax.Array, jax.Array]:
    """Decomposes a positive float32: 24-bit ``mantissa * 2**(exponent - 24)``."""
    bits = lax.bitcast_convert_type(jnp.asarray(x, jnp.float32), jnp.int32)
    return (bits & 0x7FFFFF) | 0x800000, (bits >> 23) - 126
