"""Means of powers of magnitudes, with the same bits in every program.

A float sum depends on the order of its terms, and XLA's order depends on the fusion,
the mesh and the platform. Here the terms are first rounded to fixed point: a sum of
integers does not depend on the order.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering import exact, reduction
from aqtlite.lowering.target import Target, TargetDependent
from aqtlite.shapes.dimension_numbers import Axes

_BITS = 30
"""Fractional bits of the fixed point: terms are multiples of about 2^-30 of the largest
one, which represents floats down to 2^-6 of the largest exactly."""


def power_mean(x: jax.Array, axes: Axes, p: float) -> jax.Array:
    """Computes ``mean(|x|^p)^(1/p)`` over some axes, keepdims; 0 over an empty axis.

    Each channel is scaled by a power of two such that the largest magnitude is from 1/2
    to 1, which prevents overflow and underflow. Terms smaller than the largest by a
    factor of 2^30 count as zero. The gradient is that of the formula.

    Args:
        x: float32.
        axes: axes to reduce.
        p: exponent, from 1/8 to 8.

    Returns:
        float32, keepdims; NaN or infinite where an element is.
    """
    return _PowerMean(tuple(axes), p, counts="all")(x)


def power_mean_of_nonzero(x: jax.Array, axes: Axes, p: float) -> jax.Array:
    """Computes `power_mean` of the nonzero elements; 0 if there are none."""
    return _PowerMean(tuple(axes), p, counts="nonzero")(x)


def power_mean_of(x: jax.Array, count: jax.Array, axes: Axes, p: float) -> jax.Array:
    """Computes the `power_mean` of some elements; 0 if there are none.

    Args:
        x: float32, zero where an element does not count.
        count: number of elements that count, int32, keepdims.
        axes: axes to reduce.
        p: exponent, from 1/8 to 8.
    """
    return _PowerMean(tuple(axes), p, counts="given")(x, count)


def multiple(mean: jax.Array, factor: float) -> jax.Array:
    """A multiple of a mean, capped at the largest float if the mean is finite."""
    product = jnp.minimum(mean * np.float32(factor), jnp.finfo(jnp.float32).max)
    return jnp.where(jnp.isfinite(mean), product, jnp.float32(np.nan))


@dataclasses.dataclass(frozen=True)
class _PowerMean(TargetDependent):
    """The power mean with a given exponent."""

    axes: Axes
    p: float
    counts: Literal["all", "nonzero", "given"]

    def reference(self, x: jax.Array, *count: jax.Array) -> jax.Array:
        largest = jnp.max(jnp.abs(x), axis=self.axes, keepdims=True, initial=0.0)
        has_values = largest > 0
        unit = lax.stop_gradient(jnp.where(has_values, largest, 1))
        # |x|^p need not be differentiable at 0, nor the mean of an all-zero channel.
        magnitudes = jnp.abs(jnp.where(x == 0, 1, x)) / unit
        powers = jnp.where(x == 0, 0, magnitudes**self.p)
        total = jnp.sum(powers, axis=self.axes, keepdims=True)
        mean = jnp.where(has_values, total * self._reciprocal_count(x, *count), 1)
        return jnp.where(has_values, unit * mean ** (1 / self.p), 0)

    def lowered(self, target: Target, x: jax.Array, *count: jax.Array) -> jax.Array:
        del target
        largest = reduction.largest_magnitude(x, self.axes)
        normal, half_unit = normalized(x, largest)
        powers = power(jnp.abs(normal), self.p)
        # Converted, not rounded by an addition, which a compiler could contract with
        # the product that made the powers, and thus skip a rounding.
        terms = (powers * np.float32(2.0**_BITS)).astype(jnp.int32)
        total = _sum_of_integers(terms, self.axes)
        mean = total * self._reciprocal_count(x, *count) * np.float32(2.0**-_BITS)
        result = 2 * power(mean, 1 / self.p) * half_unit
        return jnp.where(jnp.isfinite(largest), result, jnp.float32(np.nan))

    def _reciprocal_count(
        self, x: jax.Array, *given: jax.Array
    ) -> jax.Array | np.float32:
        """A reciprocal: XLA replaces division by a constant in some programs only."""
        if self.counts == "all":
            return np.float32(1 / max(count_along(x, self.axes), 1))
        count = given[0] if given else count_of_nonzero(x, self.axes)
        return 1 / jnp.maximum(count, 1).astype(jnp.float32)


def normalized(x: jax.Array, largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scales x by a power of two to magnitudes up to 1, exactly.

    Args:
        x: float32.
        largest: largest magnitude of each channel; scaled to lie from 1/2 to 1, except
            in channels of zeros.

    Returns:
        x divided by a unit, and half of that unit: the unit itself may be 2^128.
    """
    x = exact.algebraic_barrier(x)
    # A unit above 2^126 would have no normal reciprocal.
    is_large = largest > 2.0**64
    x = x * jnp.where(is_large, jnp.float32(2.0**-32), jnp.float32(1))
    mantissa = (1 << 23) - 1
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    exponent = ((bits + mantissa) >> 23) - jnp.where(is_large, 32, 0)
    exponent = jnp.clip(exponent, 2, 253)
    reciprocal = lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)
    half = lax.bitcast_convert_type((exponent - 1) << 23, jnp.float32)
    return x * reciprocal, half * jnp.where(is_large, jnp.float32(2.0**32), 1)


def power(x: jax.Array, p: float) -> jax.Array:
    """Computes ``x ** p``, without ``pow`` where there is an exact way."""
    if p == 1:
        return x
    if p == 2:
        return x * x
    # A square root is rounded correctly; a power need not be.
    return jnp.sqrt(x) if p == 0.5 else x ** np.float32(p)


def count_of_nonzero(x: jax.Array, axes: Axes) -> jax.Array:
    """The number of nonzero elements, int32, keepdims."""
    # CPUs treat subnormals as zero.
    is_zero = jnp.abs(x) < jnp.finfo(jnp.float32).tiny
    return jnp.sum(~is_zero, axis=axes, keepdims=True, dtype=jnp.int32)


def number_of(mask: jax.Array, axes: Axes) -> jax.Array:
    """The number of elements that are True, int32, keepdims."""
    return jnp.sum(mask, axis=axes, keepdims=True, dtype=jnp.int32)


def count_along(x: jax.Array, axes: Axes) -> int:
    """The number of elements that share a scale.

    Raises:
        ValueError: if it is not known, as for a symbolic axis in `jax.export`.
    """
    sizes = [x.shape[axis] for axis in axes]
    if not all(isinstance(size, int) for size in sizes):
        raise ValueError(
            f"an array of shape {x.shape} shares a scale along axes {axes}, whose "
            "sizes are not known; export with a fixed size, or calibrate with AbsMax()"
        )
    return math.prod(sizes)


def _sum_of_integers(terms: jax.Array, axes: Axes) -> jax.Array:
    """Sums integers from 0 to 2^30 exactly, and rounds the sums to float32.

    Digits are summed separately, each with few enough bits that no sum overflows.
    """
    count = count_along(terms, axes)
    bits = 31 - max(count - 1, 0).bit_length()
    if bits < 1:
        raise ValueError(
            f"{terms.shape} has {count} elements along axes {axes}, which "
            "share a scale; the largest number of them is 2^30"
        )
    sums = [
        jnp.sum(
            (terms >> shift) & ((1 << bits) - 1),
            axis=axes,
            keepdims=True,
            dtype="int32",
        )
        for shift in range(0, _BITS + 1, bits)
    ]
    # Carries go to the next digit first, so that adding a digit rounds only once.
    for i in range(len(sums) - 1):
        sums[i + 1] = sums[i + 1] + (sums[i] >> bits)
        sums[i] = sums[i] & ((1 << bits) - 1)
    total = sums[-1].astype(jnp.float32)
    for part in reversed(sums[:-1]):
        # The product is exact: contracted or not, the sum is the same.
        total = total * np.float32(2.0**bits) + part.astype(jnp.float32)
    return total
