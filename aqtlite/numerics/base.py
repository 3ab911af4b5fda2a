"""The interface of a number grid."""

import abc
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

Arithmetic = Literal["integer", "float", "table"]


class Numerics(abc.ABC):
    """A number grid: which values exist, how they are stored, and how to round.

    A grid works on *scaled* values: an array divided by its scale, in float32, so that
    the largest magnitude that calibration found lies at `bound`. With a zero point
    ``z``, a stored value ``q`` stands for ``scale * decode(q - z)``, otherwise for
    ``scale * decode(q)``.

    Subclasses are frozen dataclasses. Register one with `aqtlite.config.register` to
    write it as JSON and into checkpoints.
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
    def name(self) -> str:
        """A short name for tables, such as ``int8``."""
        return self.storage_dtype.name

    @property
    def arithmetic(self) -> Arithmetic:
        """The arithmetic in which stored values are contracted.

        - "integer": as integers, summed exactly. Scales and zero points are applied to
          the sums.
        - "float": as floats of the storage dtype, summed in float32.
        - "table": decoded first, and contracted in float32.

        By default that of the storage dtype.
        """
        is_integer = jnp.issubdtype(self.storage_dtype, jnp.integer)
        return "integer" if is_integer else "float"

    @property
    def unit(self) -> float:
        """The scaled value of one stored unit, a power of two.

        It is part of the scale of a `QTensor`. Not used by tables.
        """
        return 1.0

    @property
    def has_zero(self) -> bool:
        """False if no stored value stands for zero.

        A channel of zeros has a scale of 0 then, and stays zeros.
        """
        return True

    @property
    def zero_point_range(self) -> tuple[int, int] | None:
        """The smallest and largest stored value of a grid with a zero point.

        None: the grid has none, and is symmetric around zero.
        """
        return None

    @property
    def calibrated_range(self) -> tuple[int, int] | None:
        """The stored values onto which calibration maps the ends of a range.

        That of `zero_point_range`. A grid with stochastic rounding leaves one value
        more at each end: the zero point is rounded to an integer, and moves the ends
        by up to half a step, where clipping would bias their mean.
        """
        return self.zero_point_range

    @property
    def largest_stored(self) -> int:
        """The largest magnitude of a stored integer, less its zero point.

        It bounds how many products int32 can sum.
        """
        if self.zero_point_range is not None:
            smallest, largest = self.zero_point_range
            return largest - smallest
        return int(jnp.iinfo(self.storage_dtype).max)

    @property
    def needs_noise(self) -> bool:
        """True if `round` must be given random bits."""
        return False

    def to_nearest(self) -> "Numerics":
        """The same grid, rounding to the nearest value.

        It is the grid of frozen weights, and of activations in serving. The values and
        the bound have to be the same. A grid that needs noise and does not override
        this can only be that of gradients.

        Raises:
            NotImplementedError: if it is not overridden by a grid that needs noise.
        """
        if not self.needs_noise:
            return self
        raise NotImplementedError(
            f"{type(self).__name__} rounds stochastically, and has no to_nearest()"
        )

    @abc.abstractmethod
    def round(self, scaled: jax.Array, noise: jax.Array | None) -> jax.Array:
        """Rounds scaled values onto the grid.

        Args:
            scaled: float32, any shape. On a grid with a zero point it is in stored
                units, not yet moved by the zero point.
            noise: uint32 random bits of the same shape, or None if not `needs_noise`.

        Returns:
            Stored values: `storage_dtype`, the same shape. On a grid with a zero point,
            int32: the zero point is added, and the range enforced, by the caller.
        """

    def decode(self, stored: jax.Array) -> jax.Array:
        """The values of stored ones, before scaling.

        Args:
            stored: `storage_dtype`, or int32 less a zero point; any shape.

        Returns:
            float32 of the same shape. Grids of arithmetic "table" override it.
        """
        return stored.astype(jnp.float32)

    def gradient_mask(self, scaled: jax.Array) -> jax.Array | None:
        """The elements at which the straight-through estimator lets the gradient pass.

        Returns:
            A bool array, False where `round` clipped; None where all of it passes.
        """
        del scaled
        return None

    def gradient_mask_around(
        self, scaled: jax.Array, zero_point: jax.Array
    ) -> jax.Array | None:
        """`gradient_mask` of a grid with a zero point.

        Args:
            scaled: as `round` takes it, not yet moved by the zero point.
            zero_point: int32, which broadcasts to it.

        Returns:
            As `gradient_mask`, which it calls unless it is overridden.
        """
        del zero_point
        return self.gradient_mask(scaled)
