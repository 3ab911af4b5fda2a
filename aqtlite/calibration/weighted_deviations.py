"""Calibration by a weighted sum of deviations, averaged over batches."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.calibration import base, number, power_mean
from aqtlite.lowering import reduction
from aqtlite.numerics import Numerics

_COEFFICIENTS = "l1_coeff", "lp_coeff", "max_coeff", "constant"
_PRIORS = "l1_prior", "lp_prior", "max_prior"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightedDeviations(base.Calibration):
    """A weighted sum of mean deviations from zero, of the largest one, and a constant.

    ``bound = l1_coeff * mean(|x|) + lp_coeff * mean(|x|^p)^(1/p) + max_coeff * max(|x|)
    + constant``

    It is what AQT's `WeightedStatsCalibration` computes, with its priors. The sums of
    ones, of ``|x|`` and of ``|x|^p`` over a batch, and its largest magnitude, enter
    exponential moving averages of rate ``1 / ema_update_count``, and the means are
    quotients of those.

    Raises:
        TypeError: if a field is not of the type declared.
        ValueError: if a number is negative, `p` is not from 1/8 to 8,
            `ema_update_count` or `update_count_prior` are not positive, or all
            coefficients are 0.
    """

    l1_coeff: float = 0.0
    """Of the mean magnitude."""

    lp_coeff: float = 0.0
    """Of the root of the mean power."""

    max_coeff: float = 0.0
    """Of the largest magnitude."""

    constant: float = 0.0
    """A bound that is added."""

    p: float = 2.0
    """The power."""

    filter_zeros: bool = True
    """Leave zeros out of the means, as there are many after a ReLU."""

    ema_update_count: float = 100.0
    """How many batches a moving average looks back upon."""

    update_count_prior: float = 1.0
    """How many elements the priors of the means stand for."""

    l1_prior: float = 0.0
    """The mean magnitude before the first batch."""

    lp_prior: float = 0.0
    """The root of the mean power before the first batch."""

    max_prior: float = 0.0
    """The largest magnitude before the first batch."""

    def __post_init__(self) -> None:
        cls = type(self).__name__
        for name in (*_COEFFICIENTS, *_PRIORS):
            value = number.checked(getattr(self, name), f"{cls}.{name}")
            if value < 0:
                raise ValueError(f"{cls}.{name} must not be negative, got {value}")
            object.__setattr__(self, name, value)
        for name in ("p", "ema_update_count", "update_count_prior"):
            value = number.checked_positive(getattr(self, name), f"{cls}.{name}")
            object.__setattr__(self, name, value)
        if not 1 / 8 <= self.p <= 8:
            raise ValueError(f"{cls}.p must be from 1/8 to 8, got {self.p}")
        if self.ema_update_count < 1:
            raise ValueError(
                f"{cls}.ema_update_count must be 1 or more, got {self.ema_update_count}"
            )
        if not isinstance(self.filter_zeros, bool):
            raise TypeError(
                f"{cls}.filter_zeros must be a bool, got {self.filter_zeros!r}"
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
            "l1": self.l1_prior * count,
            "lp": self.lp_prior**self.p * count,
            "max": self.max_prior,
        }
        return {name: jnp.full(shape, x, jnp.float32) for name, x in start.items()}

    def update(
        self, state: Any, x: jax.Array, axes: tuple[int, ...], grid: Numerics
    ) -> base.State:
        del grid
        if self.filter_zeros:
            mean, is_counted = power_mean.power_mean_of_nonzero, x != 0
        else:
            mean, is_counted = power_mean.power_mean, jnp.ones_like(x, bool)
        ones = jnp.sum(is_counted, axes, keepdims=True, dtype=jnp.int32)
        ones = ones.astype(jnp.float32)
        batch = {
            "ones": ones,
            "l1": mean(x, axes, 1.0) * ones,
            "lp": mean(x, axes, self.p) ** np.float32(self.p) * ones,
            "max": reduction.largest_magnitude(x, axes),
        }
        rate = np.float32(1 / self.ema_update_count)
        return {
            name: (1 - rate) * state[name] + rate * batch[name]
            for name in sorted(state)
        }

    def range(
        self, x: jax.Array, axes: tuple[int, ...], grid: Numerics, state: Any
    ) -> base.Range:
        del x, axes, grid
        # None is left of zeros that are not counted.
        ones = jnp.maximum(state["ones"], jnp.finfo(jnp.float32).tiny)
        l1 = state["l1"] / ones
        lp = (state["lp"] / ones) ** np.float32(1 / self.p)
        terms = self.l1_coeff * l1, self.lp_coeff * lp, self.max_coeff * state["max"]
        return base.Range(sum(terms, start=jnp.float32(self.constant)))
