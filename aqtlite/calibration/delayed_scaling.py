"""Delayed scaling: the range of a batch from earlier batches."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from aqtlite.calibration import base
from aqtlite.calibration.abs_max import AbsMax
from aqtlite.numerics import Numerics, fields
from aqtlite.shapes.dimension_numbers import Axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedScaling(base.Calibration):
    """The largest magnitude over the last batches, excluding the current one.

    The scale is known before the batch is computed, so nothing waits for a maximum.
    Values beyond the range are clipped; the first batch uses its own range. This is the
    recipe of NVIDIA's Transformer Engine (`DelayedScaling` with
    ``amax_compute_algo="max"``; Micikevicius et al. 2022, arXiv:2209.05433).

    Raises:
        TypeError: if `length` is not an int.
        ValueError: if `length` is below 1.
    """

    length: int = 16
    """Number of earlier batches."""

    def __post_init__(self) -> None:
        fields.check(self, length=fields.integer(1))

    @property
    def has_state(self) -> bool:
        return True

    @property
    def ignores_zeros(self) -> bool:
        return True

    def init_state(self, shape: tuple[int, ...], grid: Numerics) -> base.State:
        del grid
        return {
            "history": jnp.zeros((self.length, *shape), jnp.float32),
            "high": jnp.zeros(shape, jnp.float32),
        }

    def update(
        self, statistics: base.Statistics, x: jax.Array, axes: Axes, grid: Numerics
    ) -> base.State:
        del grid
        present = AbsMax().bound(x, axes)
        history = statistics.state["history"]
        high = jnp.where(statistics.batches == 0, present, history.max(0))
        history = jnp.roll(history, 1, 0).at[0].set(present)
        return {"history": history, "high": high}

    def masked_update(
        self,
        statistics: base.Statistics,
        x: jax.Array,
        mask: jax.Array,
        axes: Axes,
        grid: Numerics,
    ) -> base.State:
        del mask  # Zeros change no largest magnitude.
        return self.update(statistics, x, axes, grid)

    def range(
        self, x: jax.Array, axes: Axes, grid: Numerics, statistics: Any
    ) -> base.Range:
        del x, axes, grid
        return base.Range(statistics.state["high"])
