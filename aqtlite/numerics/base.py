"""The interface of a number grid, and the absence of a grid."""

import abc
import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.lowering import float8

Arithmetic = Literal["integer", "float", "table"]


class Numerics(abc.ABC):
    """A number grid: which values exist, how they are stored, and how to round.

    A grid works on *scaled* values: an array divided by its scale, in float32, so that
    the calibrated magnitude lies at `bound`. A stored value ``q`` represents
    ``scale * decode(q)``, or ``scale * decode(q - z)`` with a zero point ``z``.

    Subclasses are frozen dataclasses. Register one with `aqtlite.config.register` to
    write it as JSON and into checkpoints.
    """

    @property
    @abc.abstractmethod
    def bound(self) -> float:
        """Scaled magnitude onto which calibration maps the largest value."""

    @property
    @abc.abstractmethod
    def storage_dtype(self) -> np.dtype:
        """Dtype of the stored values."""

    @property
    def name(self) -> str:
        """Short name for tables, such as ``int8``."""
        return self.storage_dtype.name

    @property
    def arithmetic(self) -> Arithmetic:
        """Arithmetic in which stored values are contracted.

        - "integer": as integers, summed exactly. Scales and zero points are applied to
          the sums.
        - "float": as floats of the storage dtype, summed in float32.
        - "table": decoded first, then contracted in float32.

        By default determined by the storage dtype.
        """
        is_integer = jnp.issubdtype(self.storage_dtype, jnp.integer)
        return "integer" if is_integer else "float"

    @property
    def unit(self) -> float:
        """Scaled value of one stored unit, a power of two.

        Included in the scale of a `QTensor`. Not used for "table" arithmetic.
        """
        return 1.0

    @property
    def has_zero(self) -> bool:
        """Whether a stored value represents zero.

        If False, an all-zero channel has a scale of 0 and stays zero.
        """
        return True

    @property
    def zero_point_range(self) -> tuple[int, int] | None:
        """Smallest and largest stored value of a grid with a zero point.

        None: the grid has no zero point and is symmetric.
        """
        return None

    @property
    def calibrated_range(self) -> tuple[int, int] | None:
        """Stored values onto which calibration maps the ends of a range.

        By default `zero_point_range`. With stochastic rounding, a grid reserves one
        more value at each end: rounding the zero point to an integer moves the ends by
        up to half a step, and clipping there would bias the mean.
        """
        return self.zero_point_range

    @property
    def largest_stored(self) -> int:
        """Largest magnitude of a stored integer minus the zero point.

        Limits how many products can be summed in int32.
        """
        if self.zero_point_range is not None:
            smallest, largest = self.zero_point_range
            return largest - smallest
        return int(jnp.iinfo(self.storage_dtype).max)

    @property
    def needs_noise(self) -> bool:
        """True if `round` needs random bits."""
        return False

    def to_nearest(self) -> "Numerics":
        """The same grid with rounding to nearest.

        Used for frozen weights, and for activations in serving. The values and the
        bound must not change. A grid that needs noise and does not override this method
        can only be used for gradients.

        Raises:
            NotImplementedError: if the grid needs noise and does not override it.
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
            scaled: scaled values, float32, any shape. On a grid with a zero point, in
                stored units, before the zero point is added.
            noise: random bits, uint32, of the shape of `scaled`, or None if not
                `needs_noise`.

        Returns:
            Stored values in `storage_dtype`, of the shape of `scaled`. On a grid with a
            zero point, int32: the caller adds the zero point and clips to the range.
        """

    def decode(self, stored: jax.Array) -> jax.Array:
        """Decodes stored values to scaled values; override it for "table" arithmetic.

        Args:
            stored: stored values in `storage_dtype`, or int32 after subtracting the
                zero point; any shape.

        Returns:
            float32, of the shape of `stored`.
        """
        return float8.widened(stored)

    def gradient_mask(self, scaled: jax.Array) -> jax.Array | None:
        """The elements to which the straight-through estimator passes the gradient.

        Returns:
            Bool array, False where `round` clipped; None if the gradient passes to all.
        """
        del scaled
        return None

    def gradient_mask_around(
        self, scaled: jax.Array, zero_point: jax.Array
    ) -> jax.Array | None:
        """`gradient_mask` for a grid with a zero point.

        Args:
            scaled: scaled values, as for `round`, before the zero point is added.
            zero_point: zero point, int32, broadcastable to `scaled`.

        Returns:
            As for `gradient_mask`, which is called by default.
        """
        del zero_point
        return self.gradient_mask(scaled)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoNumerics:
    """Leaves the operand unquantized.

    >>> from aqtlite import config, numerics
    >>> config.weight_only(bits=8).fwd.lhs.numerics == numerics.NoNumerics()
    True
    """
