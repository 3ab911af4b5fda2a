"""Symmetric integer grids: int8, int4, ternary, binary and other widths."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering import exact
from aqtlite.lowering.elementwise import Elementwise
from aqtlite.numerics import base, fields, rounding


@dataclasses.dataclass(frozen=True, kw_only=True)
class IntSymmetric(base.Numerics):
    """Integers of `bits` bits, symmetric around zero.

    The table has the value onto which the largest magnitude of a channel is mapped
    (`bound`), for the four kinds of grid at 8, 2 and 1 bits. The convention is that of
    Google's AQT (``aqt.jax.v2.numerics.int_numerics``):

    ============= ================ ===== === === ==========================
    preserve_zero preserve_max_val 8     2   1   the grid
    ============= ================ ===== === === ==========================
    False         False            128   2   1   halves: ..., -0.5, 0.5, ...
    False         True             127.5 1.5 0.5 halves
    True          False            127.5 1.5 --  integers, zero among them
    True          True             127   1   --  integers
    ============= ================ ===== === === ==========================

    A grid of halves has no zero and is stored doubled, as odd integers. A zero becomes
    half a step, except in an all-zero channel, which has a scale of 0 and stays zero.

    Grids with stored values beyond 127 (above 8 bits, and halves at 8 bits) are
    emulated: stored as int16, and contracted as two or three int8 digits. Where sums
    could overflow int32, the digits' sums are combined in float32.

    >>> IntSymmetric(bits=8).bound, IntSymmetric(bits=8).storage_dtype
    (127.5, dtype('int8'))
    >>> IntSymmetric(bits=1).round(jnp.array([-0.3, 0.2]), None).tolist()
    [-1, 1]

    Raises:
        ValueError: if `bits` is not from 1 to 16 (15 without a zero), if zero would be
            the only value (one bit and `preserve_zero`), or if stochastic rounding is
            set for a grid that clips the largest value.
        TypeError: if a field is of another type than declared.
    """

    bits: int
    """Width of the grid in bits, 1 to 16."""

    preserve_zero: bool | None = None
    """Make zero a grid point. None: yes, except at one bit."""

    preserve_max_val: bool = False
    """Map the largest magnitude onto the last grid point (True) or onto the outer edge
    of the last bucket (False), which makes the steps slightly finer."""

    clip: bool = True
    """Clip to the grid before rounding. False leaves only the saturation of the
    storage dtype, which is equivalent unless the calibration clips."""

    clip_gradient: bool = False
    """Zero the gradient of clipped elements. Set it together with a calibration that
    clips (``AbsMax(clipping_scale < 1)``)."""

    stochastic_rounding: bool = False
    """Round up with a probability equal to the distance from the grid point below,
    which makes rounding unbiased. Needs `preserve_max_val`: other grids clip the
    largest element, which would bias the mean."""

    def __post_init__(self) -> None:
        fields.check(self, bits=fields.integer(1, 16))
        if self.preserve_zero is None:
            object.__setattr__(self, "preserve_zero", self.bits > 1)
        flags = (field.name for field in dataclasses.fields(self)[1:])
        fields.check(self, **dict.fromkeys(flags, fields.flag))
        if self._last_center == 0:
            raise ValueError(
                "IntSymmetric(bits=1, preserve_zero=True) has no value but zero; leave "
                "preserve_zero at None or False"
            )
        if self.bits == 16 and not self.preserve_zero:
            raise ValueError(
                "IntSymmetric(bits=16, preserve_zero=False) is stored doubled, which "
                "int16 does not hold; use at most 15 bits, or preserve_zero=True"
            )
        if self.stochastic_rounding and not self.preserve_max_val:
            raise ValueError(
                "IntSymmetric.stochastic_rounding=True needs preserve_max_val=True: "
                "without it the largest element of a channel lies half a step outside "
                "the grid, is clipped, and its mean over the noise is biased"
            )

    @property
    def _last_center(self) -> float:
        """The largest grid point."""
        return 2.0 ** (self.bits - 1) - (1.0 if self.preserve_zero else 0.5)

    @property
    def bound(self) -> float:
        return self._last_center if self.preserve_max_val else self._last_center + 0.5

    @property
    def unit(self) -> float:
        return 1.0 if self.preserve_zero else 0.5

    @property
    def has_zero(self) -> bool:
        return bool(self.preserve_zero)

    @property
    def arithmetic(self) -> base.Arithmetic:
        return "integer"

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    @property
    def storage_dtype(self) -> np.dtype:
        largest = int(self._last_center / self.unit)
        for name in ("int4", "int8"):
            if largest <= jnp.iinfo(name).max:
                return np.dtype(jnp.dtype(name))
        return np.dtype("int16")

    @property
    def largest_stored(self) -> int:
        return int(self._clip_bound / self.unit)

    @property
    def needs_noise(self) -> bool:
        return self.stochastic_rounding

    def to_nearest(self) -> "IntSymmetric":
        return dataclasses.replace(self, stochastic_rounding=False)

    @property
    def _clip_bound(self) -> float:
        """Magnitude to clip at: the last center, or the edge of the storage dtype."""
        if self.clip:
            return self._last_center
        return float(jnp.iinfo(self.storage_dtype).max) * self.unit

    def round(self, scaled: jax.Array, noise: jax.Array | None) -> jax.Array:
        if self.stochastic_rounding:
            return Elementwise(_stochastic, (self,))(scaled, rounding.given(noise))
        return Elementwise(_nearest, (self,))(scaled)

    def clipped(self, scaled: jax.Array) -> jax.Array:
        """Clips scaled values to those that are stored, float32."""
        bound = np.float32(self._clip_bound)
        return lax.clamp(-bound, lax.convert_element_type(scaled, jnp.float32), bound)

    def gradient_mask(self, scaled: jax.Array) -> jax.Array | None:
        if not (self.clip and self.clip_gradient):
            return None
        return jnp.abs(scaled) <= self._clip_bound


def _nearest(grid: IntSymmetric, scaled: jax.Array) -> jax.Array:
    clipped = grid.clipped(scaled)
    if grid.preserve_zero:
        return exact.nearest_integer(clipped, grid.storage_dtype)
    return _odd(grid, lax.floor(clipped))


def _stochastic(grid: IntSymmetric, scaled: jax.Array, noise: jax.Array) -> jax.Array:
    clipped = grid.clipped(scaled)
    if grid.preserve_zero:
        return rounding.stochastically(clipped, noise, grid.storage_dtype)
    lower = lax.sub(clipped, np.float32(0.5))
    return _odd(grid, rounding.stochastically(lower, noise))


def _odd(grid: IntSymmetric, below: jax.Array) -> jax.Array:
    """Stores the centers of steps, from the grid points below them."""
    one, two = (np.asarray(number, below.dtype) for number in (1, 2))
    odd = lax.add(lax.mul(two, below), one)
    return lax.convert_element_type(odd, grid.storage_dtype)
