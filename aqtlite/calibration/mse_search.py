"""Calibration by a search for the least squared error."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.calibration import base, min_max, power_mean, scales
from aqtlite.lowering import reduction
from aqtlite.numerics import Numerics, fields, rounding
from aqtlite.shapes.dimension_numbers import Axes

# Errors are multiples of 2^-29 of the power of two above the largest magnitude.
_FIXED_POINT = np.float32(2.0**29)
# Random bits with which stochastic rounding rounds to nearest.
_MEDIAN_NOISE = np.uint32(1 << 31)

_Mean = Callable[[jax.Array, Axes], jax.Array]
"""Function from errors and axes to the root of the mean of the squares."""

CANDIDATES = tuple(round(1 - 0.02 * i, 2) for i in range(40))
"""Fractions tried by default: 1, 0.98, ..., 0.22."""


def checked_candidates(
    given: Any, where: str, largest: float = 1.0
) -> tuple[float, ...]:
    """Checks fractions, above 0 and at most `largest`; sorts them, largest first."""
    if not isinstance(given, tuple | list):
        raise TypeError(f"{where} must be a tuple of numbers, got {given!r}")
    pairs = enumerate(given)
    found = {fields.positive(value, f"{where}[{i}]") for i, value in pairs}
    if not found or max(found) > largest:
        raise ValueError(
            f"{where} are fractions of the largest magnitude, above 0 and at most "
            f"{largest:g}, such as (1.0, 0.9, 0.8); got {given!r}"
        )
    return tuple(sorted(found, reverse=True))


def best_fraction(errors: jax.Array, fractions: jax.Array) -> jax.Array:
    """The largest of the fractions with the least error, per channel.

    Does not index by argmin: on a mesh with explicit axes, the gather would need an
    explicit sharding.
    """
    shape = fractions.shape + (1,) * (errors.ndim - 1)
    is_least = errors == errors.min(axis=0, keepdims=True)
    return jnp.where(is_least, fractions.reshape(shape), 0).max(axis=0)


def _checked(given: Any, where: str) -> tuple[float, ...]:
    # Above 2, errors could leave the range of the fixed point.
    return checked_candidates(given, where, largest=2.0)


@dataclasses.dataclass(frozen=True)
class MseSearch(base.Calibration):
    """The fraction of the largest magnitude, or range, with the least squared error.

    ``bound = c * max(|x|)``, where ``c`` is the element of `candidates` with the least
    ``mean((x - quantized(x, c))^2)``, chosen per channel: clipping a few large elements
    gives all others finer steps. For a grid with a zero point, the range is from
    ``c * min(x, 0)`` to ``c * max(x, 0)``. On a tie, the larger bound is chosen. OCTAV
    (Sakr et al. 2022, arXiv:2206.06501) finds the best of all fractions by iteration.

    A grid of unequal steps may gain from a fraction above 1: E2M1 has no value between
    4 and 6, so that ``MseSearch((1.5, 1.0))``, which maps the largest magnitude to 4 or
    6, makes the error of NVFP4's blocks smaller ("four over six", Cook et al. 2025,
    arXiv:2512.02010).

    The error is computed with the scale before `po2_scale` and with rounding to
    nearest, even on a grid with stochastic rounding. It is summed in fixed point, with
    the same bits in every program, so that all programs choose alike on a near tie. A
    channel with NaN or infinity becomes NaN. Gradients treat the choice as a constant.

    Each candidate costs one quantization of the array and two reductions, in a loop:
    time grows with the number of candidates, memory does not. Meant for weights, which
    are quantized once for serving; in training, the cost arises at every step
    (`aqtlite.errors.CostWarning`), unless `Periodic` keeps the range.

    >>> from aqtlite import numerics
    >>> x = jnp.array([[4.0] + 99 * [0.5], [1.0, 0.5] + 98 * [-1.0]])
    >>> grid = numerics.IntSymmetric(bits=3)
    >>> MseSearch((1.0, 0.5, 0.25)).range(x, (1,), grid, ()).high.tolist()
    [[2.0], [1.0]]

    Raises:
        ValueError: if there are no candidates, or one is not above 0 and at most 2.
        TypeError: if `candidates` is not a tuple or a list of numbers.
    """

    candidates: tuple[float, ...] = CANDIDATES
    """Fractions to try, in any order; stored with the largest first."""

    def __post_init__(self) -> None:
        fields.check(self, candidates=_checked)

    @property
    def ignores_zeros(self) -> bool:
        return True  # They have no error.

    @property
    def cost_in_training(self) -> str | None:
        return (
            "one quantization of the array and two reductions for each of its "
            f"{len(self.candidates)} candidates"
        )

    def range(
        self, x: jax.Array, axes: Axes, grid: Numerics, state: base.State
    ) -> base.Range:
        del state
        return self._found(x, axes, grid, _root_mean_square)

    def masked_range(
        self, x: jax.Array, mask: jax.Array, axes: Axes, grid: Numerics
    ) -> base.Range:
        count = power_mean.number_of(mask, axes)

        def mean(error: jax.Array, axes: Axes) -> jax.Array:
            error = jnp.where(mask, error, jnp.float32(0))
            return power_mean.power_mean_of(error, count, axes, 2.0)

        return self._found(x, axes, grid, mean)

    def _found(
        self, x: jax.Array, axes: Axes, grid: Numerics, mean: _Mean
    ) -> base.Range:
        """The range with the least mean of squared errors."""
        if grid.zero_point_range is None:
            whole = base.Range(reduction.largest_magnitude(x, axes))
        else:
            whole = min_max.MinMax().range(x, axes, grid, ())
        known = lax.stop_gradient(whole)
        largest = known.high
        if known.low is not None:
            largest = jnp.maximum(largest, -known.low)
        values, _ = power_mean.normalized(lax.stop_gradient(x), largest)
        ends = jax.tree.map(lambda end: power_mean.normalized(end, largest)[0], known)
        fractions = jnp.asarray(self.candidates, jnp.float32)

        def error_of(fraction: jax.Array) -> jax.Array:
            found = jax.tree.map(lambda end: end * fraction, ends)
            return mean(_error(values, found, grid), axes)

        best = best_fraction(lax.map(error_of, fractions), fractions)
        # An infinite bound would make the channel NaN.
        half = jnp.finfo(jnp.float32).max / 2
        best = jnp.minimum(best, jnp.maximum(half / largest, 1))
        found: base.Range = jax.tree.map(lambda end: end * best, whole)
        return found


def _root_mean_square(error: jax.Array, axes: Axes) -> jax.Array:
    return power_mean.power_mean(error, axes, 2.0)


def _error(values: jax.Array, found: base.Range, grid: Numerics) -> jax.Array:
    """The quantization error, in fixed point.

    Args:
        values: magnitudes up to 1.
        found: range of each channel.
        grid: number grid.
    """
    scale, zero_point = scales.scale_and_zero_point(found, grid, po2=False)
    noise = jnp.full(values.shape, _MEDIAN_NOISE) if grid.needs_noise else None
    stored = grid.round(values * (jnp.float32(grid.unit) / scale), noise)
    if zero_point is not None and grid.zero_point_range is not None:
        stored = rounding.around_zero_point(stored, zero_point, grid.zero_point_range)
        stored = stored - zero_point
    quantized = grid.decode(stored) * scale
    # Subtracted as integers: a compiler could contract the product and the difference
    # of floats to an FMA.
    error = _to_fixed_point(quantized) - _to_fixed_point(values)
    return error.astype(jnp.float32)


def _to_fixed_point(x: jax.Array) -> jax.Array:
    return (x * _FIXED_POINT).astype(jnp.int32)
