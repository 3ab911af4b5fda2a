"""Calibration by a weighted sum of deviations, averaged over batches."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.calibration import base, power_mean
from aqtlite.lowering import fusion, reduction
from aqtlite.numerics import Numerics, fields
from aqtlite.shapes.dimension_numbers import Axes

_COEFFICIENTS = "l1_coeff", "lp_coeff", "max_coeff", "constant"
_MOST_BATCHES = 2**24  # Up to here, 1 - 1/n differs from 1 in float32.


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightedDeviations(base.Calibration):
    """A weighted sum of mean and largest magnitudes, plus a constant.

    ``bound = l1_coeff * mean(|x|) + lp_coeff * mean(|x|^p)^(1/p) + max_coeff * max(|x|)
    + constant``

    Equals AQT's `WeightedStatsCalibration`, including its priors. The sums of ones, of
    ``|x|`` and of ``|x|^p`` over each batch, and the batch's largest magnitude, enter
    exponential moving averages with rate ``1 / ema_update_count``; the means are
    quotients of these averages. The state holds the quotients (for powers, their root),
    which do not overflow or underflow unless the values do.

    Raises:
        TypeError: if a field is not of the type declared.
        ValueError: if a number is negative, `p` is not from 1/8 to 8,
            `ema_update_count` not from 1 to 2^24, `update_count_prior` is not positive,
            or all coefficients are 0; or if a number is neither 0 nor normal in
            float32.
    """

    l1_coeff: float = 0.0
    """Weight of the mean magnitude."""

    lp_coeff: float = 0.0
    """Weight of the power mean, ``mean(|x|^p)^(1/p)``."""

    max_coeff: float = 0.0
    """Weight of the largest magnitude."""

    constant: float = 0.0
    """Constant added to the bound."""

    p: float = 2.0
    """Exponent of the power mean."""

    filter_zeros: bool = True
    """Exclude zeros from the means; there are many after a ReLU."""

    ema_update_count: float = 100.0
    """Inverse rate of the moving averages, in batches."""

    update_count_prior: float = 1.0
    """Weight of the priors of the means, as a number of elements."""

    l1_prior: float = 0.0
    """Mean magnitude before the first batch."""

    lp_prior: float = 0.0
    """Power mean before the first batch."""

    max_prior: float = 0.0
    """Largest magnitude before the first batch."""

    def __post_init__(self) -> None:
        cls, counts = type(self).__name__, ("ema_update_count", "update_count_prior")
        not_negative = (*_COEFFICIENTS, "l1_prior", "lp_prior", "max_prior")
        checks = dict.fromkeys(not_negative, fields.not_negative)
        checks |= dict.fromkeys(("p", *counts), fields.positive)
        fields.check(self, filter_zeros=fields.flag, **checks)
        if not 1 / 8 <= self.p <= 8:
            raise ValueError(f"{cls}.p must be from 1/8 to 8, got {self.p}")
        if not 1 <= self.ema_update_count <= _MOST_BATCHES:
            raise ValueError(
                f"{cls}.ema_update_count must be from 1 to 2^24, of which the "
                "reciprocal changes an average in float32, got "
                f"{self.ema_update_count}"
            )
        if not any(getattr(self, name) for name in _COEFFICIENTS):
            raise ValueError(
                f"{cls} needs a coefficient that is not 0: {', '.join(_COEFFICIENTS)}"
            )

    @property
    def has_state(self) -> bool:
        return True

    def init_state(self, shape: tuple[int, ...], grid: Numerics) -> base.State:
        del grid
        count = self.update_count_prior
        start = {
            "ones": count,
            "l1": self.l1_prior,
            "lp": self.lp_prior,
            "max": self.max_prior,
        }
        return {name: jnp.full(shape, x, jnp.float32) for name, x in start.items()}

    def update(
        self, statistics: base.Statistics, x: jax.Array, axes: Axes, grid: Numerics
    ) -> base.State:
        del grid
        if self.filter_zeros:
            ones = power_mean.count_of_nonzero(x, axes).astype(jnp.float32)
            mean = power_mean.power_mean_of_nonzero
        else:
            count = power_mean.count_along(x, axes)
            ones = jnp.full_like(statistics.state["ones"], count)
            mean = power_mean.power_mean
        return self._averaged(statistics.state, x, axes, ones, mean)

    def masked_update(
        self,
        statistics: base.Statistics,
        x: jax.Array,
        mask: jax.Array,
        axes: Axes,
        grid: Numerics,
    ) -> base.State:
        if self.filter_zeros:
            return self.update(statistics, x, axes, grid)
        count = power_mean.number_of(mask, axes)
        ones = count.astype(jnp.float32)

        def mean(x: jax.Array, axes: Axes, p: float) -> jax.Array:
            return power_mean.power_mean_of(x, count, axes, p)

        return self._averaged(statistics.state, x, axes, ones, mean)

    def _averaged(
        self,
        state: base.State,
        x: jax.Array,
        axes: Axes,
        ones: jax.Array,
        mean: Callable[[jax.Array, Axes, float], jax.Array],
    ) -> base.State:
        """The moving averages after one more batch.

        Args:
            state: the averages before.
            x: batch, float32.
            axes: axes that share a scale.
            ones: number of elements in the means, float32, keepdims.
            mean: power mean of an array along axes with an exponent.
        """
        rate = np.float32(1 / self.ema_update_count)
        rates = np.float32(1) - rate, rate
        weights = state["ones"] * rates[0], ones * rates[1]
        total = fusion.sum_of_products((state["ones"], rates[0]), (ones, rates[1]))
        # The total can reach zero if zeros are not counted.
        total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
        shares = [fusion.barrier(weight / total) for weight in weights]
        means = {
            name: _mean((state[name], mean(x, axes, p)), shares, p)
            for name, p in (("l1", 1.0), ("lp", self.p))
        }
        present = reduction.largest_magnitude(x, axes)
        largest = fusion.sum_of_products((state["max"], rates[0]), (present, rates[1]))
        return {"ones": total, **means, "max": largest}

    def range(
        self, x: jax.Array, axes: Axes, grid: Numerics, statistics: Any
    ) -> base.Range:
        del x, axes, grid
        state = statistics.state
        bound = fusion.sum_of_products(
            (state["l1"], np.float32(self.l1_coeff)),
            (state["lp"], np.float32(self.lp_coeff)),
            (state["max"], np.float32(self.max_coeff)),
        )
        return base.Range(bound + np.float32(self.constant))


# Compiled, so that the exponent is a constant in every program.
@functools.partial(jax.jit, static_argnames="p")
def _mean(
    means: tuple[jax.Array, jax.Array], shares: Sequence[jax.Array], p: float
) -> jax.Array:
    """The power mean of two parts, from their power means and shares."""
    unit = jnp.maximum(*means)
    unit = jnp.where(unit == 0, np.float32(1), unit)
    powers = [fusion.barrier(power_mean.power(one / unit, p)) for one in means]
    mean = fusion.sum_of_products(*zip(powers, shares, strict=True))
    return power_mean.power(mean, 1 / p) * unit
