"""Affine integer grids: uint8, int8 and narrower, with a zero point."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.lowering import exact
from aqtlite.numerics import base, fields, rounding


@dataclasses.dataclass(frozen=True, kw_only=True)
class IntAffine(base.Numerics):
    """Integers of `bits` bits with a zero point.

    A stored value ``q`` represents ``scale * (q - zero_point)``, where

    - ``q = clip(round(x / scale) + zero_point, smallest, largest)``,
    - ``scale = (high - low) / (largest - smallest)``, and
    - ``zero_point = smallest - round(low / scale)``,

    for the calibrated range from ``low`` to ``high``, widened to contain zero, so that
    zero is a stored value (Jacob et al. 2018, "Quantization and Training of Neural
    Networks for Efficient Integer-Arithmetic-Only Inference", arXiv:1712.05877). Ties
    are rounded to even. No stored values are wasted on negative numbers if there are
    none, as after a ReLU. Needs a calibration that finds a range, such as `MinMax`.

    The ranges of stored values at 8 and 4 bits:

    ====== ============ =========== ========
    signed narrow_range 8           4
    ====== ============ =========== ========
    False  False        0..255      0..15
    False  True         1..255      1..15
    True   False        -128..127   -8..7
    True   True         -127..127   -7..7
    ====== ============ =========== ========

    All of them are contracted as signed integers, in exact int32 sums, at equal cost.
    Grids of up to four bits are stored as uint4 or int4.

    >>> IntAffine(bits=8).zero_point_range, IntAffine(bits=8).storage_dtype
    ((0, 255), dtype('uint8'))
    >>> IntAffine(bits=8, signed=True, narrow_range=True).zero_point_range
    (-127, 127)

    Raises:
        ValueError: if `bits` is not from 2 to 8, or if stochastic rounding is set with
            only three stored values.
        TypeError: if a field is of another type than declared.
    """

    bits: int = 8
    """Width of the grid in bits, 2 to 8."""

    signed: bool = False
    """Store values in a signed dtype, around zero, instead of from zero on."""

    narrow_range: bool = False
    """Leave out the smallest stored value, so that a signed grid is symmetric."""

    clip_gradient: bool = False
    """Zero the gradient of clipped elements, which lie more than half a step beyond the
    last stored value. Set it together with a calibration that clips (``ConstantRange``,
    or ``Percentile`` below 100)."""

    stochastic_rounding: bool = False
    """Round up with a probability equal to the distance from the stored value below,
    which makes rounding unbiased. The range is then mapped onto all stored values but
    the first and the last: rounding the zero point moves the ends of the range by up to
    half a step, and clipping there would bias the mean."""

    def __post_init__(self) -> None:
        one_bit = "; for one bit use IntSymmetric(bits=1)" if self.bits == 1 else ""
        flags = (field.name for field in dataclasses.fields(self)[1:])
        checks = dict.fromkeys(flags, fields.flag)
        fields.check(self, bits=fields.integer(2, 8, one_bit), **checks)
        if self.stochastic_rounding and self.largest_stored < 3:
            raise ValueError(
                "IntAffine(bits=2, narrow_range=True, stochastic_rounding=True) has "
                "three stored values, which leave none to map a range onto; use "
                "narrow_range=False, or more bits"
            )

    @property
    def zero_point_range(self) -> tuple[int, int]:
        lowest = -(2 ** (self.bits - 1)) if self.signed else 0
        return lowest + int(self.narrow_range), lowest + 2**self.bits - 1

    @property
    def calibrated_range(self) -> tuple[int, int]:
        smallest, largest = self.zero_point_range
        margin = int(self.stochastic_rounding)
        return smallest + margin, largest - margin

    @property
    def bound(self) -> float:
        return float(self.largest_stored)

    @property
    def storage_dtype(self) -> np.dtype:
        width = 4 if self.bits <= 4 else 8
        return np.dtype(jnp.dtype(f"int{width}" if self.signed else f"uint{width}"))

    @property
    def name(self) -> str:
        return f"int{self.bits}" if self.signed else f"uint{self.bits}"

    @property
    def needs_noise(self) -> bool:
        return self.stochastic_rounding

    def to_nearest(self) -> "IntAffine":
        return dataclasses.replace(self, stochastic_rounding=False)

    def round(self, scaled: jax.Array, noise: jax.Array | None) -> jax.Array:
        clipped = jnp.clip(scaled, -self.bound, self.bound)
        if not self.stochastic_rounding:
            return exact.nearest_integer(clipped)
        return rounding.stochastically(clipped, noise)

    def gradient_mask_around(
        self, scaled: jax.Array, zero_point: jax.Array
    ) -> jax.Array | None:
        if not self.clip_gradient:
            return None
        smallest, largest = self.zero_point_range
        # Integers and halves: the sums are exact.
        low = (smallest - zero_point).astype(jnp.float32) - np.float32(0.5)
        high = (largest - zero_point).astype(jnp.float32) + np.float32(0.5)
        return (scaled >= low) & (scaled <= high)
