"""What every number grid has to offer."""

import abc

import jax
import jax.numpy as jnp
import numpy as np


class Numerics(abc.ABC):
    """A number grid: which values exist, how they are stored, and how to round.

    A grid works on *scaled* values: an array divided by its scale, in float32, so
    that the largest magnitude that calibration found lies at `bound`.
    """

    @property
    @abc.abstractmethod
    def bound(self) -> float:
        """The scaled magnitude onto which calibration maps the largest value."""

    @property
    @abc.abstractmethod
    def storage_dtype(self) -> np.dtype:
        """The dtype of the stored values."""

    @property
    @abc.abstractmethod
    def unit(self) -> float:
        """What one stored unit stands for on the scaled axis (a power of two)."""

    @property
    def largest_stored(self) -> int:
        """The largest magnitude of a stored value: how far sums can grow."""
        return int(jnp.iinfo(self.storage_dtype).max)

    @property
    @abc.abstractmethod
    def needs_noise(self) -> bool:
        """Whether `round` must be given random bits."""

    @abc.abstractmethod
    def round(self, scaled: jax.Array, noise: jax.Array | None) -> jax.Array:
        """Rounds scaled values onto the grid.

        Args:
            scaled: float32, any shape.
            noise: uint32 random bits of the same shape, or None if not `needs_noise`.

        Returns:
            Stored values: `storage_dtype`, the same shape; ``stored * unit`` is the
            value on the scaled axis.
        """

    @abc.abstractmethod
    def gradient_mask(self, scaled: jax.Array) -> jax.Array | None:
        """Where the straight-through estimator lets the gradient pass.

        Returns:
            A bool array, False where `round` clipped; None where all of it passes.
        """
