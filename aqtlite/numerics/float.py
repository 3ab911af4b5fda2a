"""Floating-point grids: fp8, fp6, fp4 and other widths."""

import dataclasses
import functools
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering import exact, float8
from aqtlite.lowering.elementwise import Elementwise
from aqtlite.numerics import base, fields, rounding

SpecialValues = Literal["none", "nan", "ieee", "fnuz"]

# Narrowest first. XLA has no fp6 arrays on CPUs.
_STORAGE = (
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e4m3b11fnuz",
    "float16",
    "bfloat16",
    "float32",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float(base.Numerics):
    """Signed floats of `exponent_bits` and `mantissa_bits`, with subnormals.

    With ``bias = 2^(exponent_bits - 1) - 1``, the values are
    ``±2^(max(E, 1) - bias) * ((E > 0) + M / 2^mantissa_bits)`` for exponents ``E`` and
    mantissas ``M`` from 0 on. Values are rounded to nearest, with ties to an even
    ``M``, and saturate at the largest value.

    The 8-bit formats follow Micikevicius et al. 2022, "FP8 Formats for Deep Learning"
    (arXiv:2209.05433), and the 6-bit and 4-bit formats the OCP Microscaling
    specification (arXiv:2310.10537):

    ============= ============= ============= ======= =============
    exponent_bits mantissa_bits known as      largest storage
    ============= ============= ============= ======= =============
    4             3             float8_e4m3fn 448     float8_e4m3fn
    5             2             float8_e5m2   57344   float8_e5m2
    3             2             float6_e3m2fn 28      float8_e4m3fn
    2             3             float6_e2m3fn 7.5     float8_e4m3fn
    2             1             float4_e2m1fn 6       float8_e4m3fn
    ============= ============= ============= ======= =============

    Other widths are emulated: values are stored in the narrowest XLA dtype of 8, 16 or
    32 bits that represents all of them. `from_dtype` makes the grid of a dtype.

    >>> e4m3 = Float(exponent_bits=4, mantissa_bits=3)
    >>> e4m3.bound, e4m3.storage_dtype
    (448.0, dtype(float8_e4m3fn))
    >>> e4m3.round(jnp.array([0.3, 17.0, 1000.0]), None).astype(jnp.float32).tolist()
    [0.3125, 16.0, 448.0]
    >>> Float.from_dtype("float8_e5m2", stochastic_rounding=True).name
    'fp8_e5m2'

    Raises:
        ValueError: if a width, the bias or `special_values` is out of range.
        TypeError: if a field is of another type than declared.
    """

    exponent_bits: int
    """Width of the exponent in bits, 1 to 5."""

    mantissa_bits: int
    """Width of the mantissa in bits, 0 to 10."""

    special_values: SpecialValues | None = None
    """Codes reserved for infinities and NaN, which determine the largest value:

    - "none": no codes;
    - "nan": the code with all bits of exponent and mantissa set;
    - "ieee": all codes with the largest exponent;
    - "fnuz": the code of minus zero; the default bias is larger by 1.

    None: "none" up to seven bits, "nan" for E4M3, "ieee" for others."""

    bias: int | None = None
    """Exponent bias. None: ``2^(exponent_bits - 1) - 1``."""

    clip_gradient: bool = False
    """Zero the gradient of clipped elements. Set it together with a calibration that
    clips (``AbsMax(clipping_scale < 1)``)."""

    stochastic_rounding: bool = False
    """Round away from zero with a probability equal to the distance from the grid point
    towards zero, in units of the local spacing, which makes rounding unbiased."""

    def __post_init__(self) -> None:
        exponent, mantissa = fields.integer(1, 5), fields.integer(0, 10)
        fields.check(self, exponent_bits=exponent, mantissa_bits=mantissa)
        fields.check(self, bias=fields.or_none(fields.integer(0, 31)))
        fields.check(self, clip_gradient=fields.flag, stochastic_rounding=fields.flag)
        if self.special_values is None:
            object.__setattr__(self, "special_values", self._usual_special_values())
        if self.special_values not in get_args(SpecialValues):
            raise ValueError(
                f"Float.special_values={self.special_values!r} is not known; give one "
                f"of {', '.join(map(repr, get_args(SpecialValues)))}, or None"
            )
        if self.bias is None:
            is_fnuz = self.special_values == "fnuz"
            bias = 2 ** (self.exponent_bits - 1) - (0 if is_fnuz else 1)
            object.__setattr__(self, "bias", bias)
        if self.bound < 1:
            raise ValueError(
                f"the largest value of {self!r} is {self.bound:g}, and has to be 1 or "
                'more; give it more bits, special_values="none" or a smaller bias'
            )

    def _usual_special_values(self) -> SpecialValues:
        widths = self.exponent_bits, self.mantissa_bits
        if widths == (4, 3):
            return "nan"
        return "none" if sum(widths) < 7 else "ieee"

    @classmethod
    def from_dtype(cls, dtype: Any, **fields: bool) -> "Float":
        """The grid of the finite values of a dtype.

        Args:
            dtype: signed floating dtype of jax.numpy with 4 to 16 bits, or its name,
                such as ``"float6_e3m2fn"``.
            **fields: `clip_gradient` and `stochastic_rounding`.

        Raises:
            ValueError: if the dtype is not such a dtype.

        >>> Float.from_dtype("float8_e4m3b11fnuz").bound
        30.0
        """
        try:
            name = jnp.dtype(dtype).name
        except TypeError:
            name = repr(dtype)
        if name not in _DTYPES:
            raise ValueError(
                f"{name} is no dtype of a Float grid; give one of {', '.join(_DTYPES)}"
            )
        exponent_bits, mantissa_bits, special_values, bias = _DTYPES[name]
        return cls(
            exponent_bits=exponent_bits,
            mantissa_bits=mantissa_bits,
            special_values=special_values,
            bias=bias,
            **fields,
        )

    @property
    def _largest_code(self) -> int:
        """The exponent and mantissa bits of the largest value."""
        count = 1 << (self.exponent_bits + self.mantissa_bits)
        if self.special_values == "ieee":
            return count - (1 << self.mantissa_bits) - 1
        return count - (2 if self.special_values == "nan" else 1)

    @property
    def _smallest_exponent(self) -> int:
        """The exponent of subnormals and of the smallest normal values."""
        return 1 - (self.bias or 0)

    @property
    def bound(self) -> float:
        return self._value(self._largest_code)

    @property
    def smallest(self) -> float:
        """The smallest positive value."""
        return self._value(1)

    @property
    def bits(self) -> int:
        """Width of a value with its sign, in bits."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def magnitudes(self) -> tuple[float, ...]:
        """All magnitudes of values, from zero on."""
        return tuple(map(self._value, range(self._largest_code + 1)))

    def _value(self, code: int) -> float:
        """The value of a code, the exponent and mantissa bits."""
        exponent, mantissa = divmod(code, 2**self.mantissa_bits)
        if exponent:
            mantissa += 2**self.mantissa_bits
        exponent = max(exponent, 1) - 1 + self._smallest_exponent
        return float(mantissa * 2.0 ** (exponent - self.mantissa_bits))

    @property
    def storage_dtype(self) -> np.dtype:
        return _narrowest_dtype(self)

    @property
    def name(self) -> str:
        """Name such as ``fp8_e4m3``, with unusual bias and special values appended."""
        suffix = ""
        if self.bias != dataclasses.replace(self, bias=None).bias:
            suffix += f"b{self.bias}"
        if self.special_values != self._usual_special_values():
            suffix += f"_{self.special_values}"
        return f"fp{self.bits}_e{self.exponent_bits}m{self.mantissa_bits}{suffix}"

    @property
    def arithmetic(self) -> base.Arithmetic:
        return "float"

    @property
    def needs_noise(self) -> bool:
        return self.stochastic_rounding

    def to_nearest(self) -> "Float":
        return dataclasses.replace(self, stochastic_rounding=False)

    def round(self, scaled: jax.Array, noise: jax.Array | None) -> jax.Array:
        noise = rounding.given(noise) if self.stochastic_rounding else None
        given = () if noise is None else (noise,)
        scaled = lax.stop_gradient(scaled.astype(jnp.float32))
        values = Elementwise(_rounded, (self,))(scaled, *given)
        # On some platforms, a conversion rounds differently; here it is exact.
        return float8.narrowed(values, self.storage_dtype)

    def gradient_mask(self, scaled: jax.Array) -> jax.Array | None:
        if not self.clip_gradient:
            return None
        return jnp.abs(scaled) <= np.float32(self.bound)


_DTYPES: dict[str, tuple[int, int, SpecialValues, int | None]] = {
    "float4_e2m1fn": (2, 1, "none", None),
    "float6_e2m3fn": (2, 3, "none", None),
    "float6_e3m2fn": (3, 2, "none", None),
    "float8_e3m4": (3, 4, "ieee", None),
    "float8_e4m3": (4, 3, "ieee", None),
    "float8_e4m3b11fnuz": (4, 3, "fnuz", 11),
    "float8_e4m3fn": (4, 3, "nan", None),
    "float8_e4m3fnuz": (4, 3, "fnuz", None),
    "float8_e5m2": (5, 2, "ieee", None),
    "float8_e5m2fnuz": (5, 2, "fnuz", None),
    "float16": (5, 10, "ieee", None),
}


_SIGN, _MAGNITUDE = np.int32(-(2**31)), np.int32(2**31 - 1)
_EXPONENT, _MANTISSA_BITS = np.int32(0xFF << 23), 23


def _rounded(grid: Float, x: jax.Array, *noise: jax.Array) -> jax.Array:
    """Rounds float32 to values of a grid, float32.

    Every product here is with a power of two and thus exact, so that FMA contraction
    changes nothing.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    # Positive floats are in the order of their bits. NaN becomes the bound.
    bound = np.int32(np.float32(grid.bound).view(np.int32))
    magnitude = lax.min(lax.bitwise_and(bits, _MAGNITUDE), bound)
    smallest = np.int32((grid._smallest_exponent + 127) << _MANTISSA_BITS)
    exponent = lax.max(lax.bitwise_and(magnitude, _EXPONENT), smallest)
    # The spacing of values is a power of two; so is its reciprocal.
    spacing = lax.sub(exponent, np.int32(grid.mantissa_bits << _MANTISSA_BITS))
    reciprocal = lax.sub(np.int32(254 << _MANTISSA_BITS), spacing)
    steps = lax.mul(
        lax.bitcast_convert_type(magnitude, jnp.float32),
        lax.bitcast_convert_type(reciprocal, jnp.float32),
    )
    round_ = rounding.stochastically if noise else exact.nearest_integer
    whole = lax.convert_element_type(round_(steps, *noise), jnp.float32)
    value = lax.mul(whole, lax.bitcast_convert_type(spacing, jnp.float32))
    sign = lax.bitwise_and(bits, _SIGN)
    if grid.special_values == "fnuz":
        # Its minus zero is NaN.
        sign = lax.select(lax.eq(whole, np.float32(0)), lax.full_like(sign, 0), sign)
    signed = lax.bitwise_or(lax.bitcast_convert_type(value, jnp.int32), sign)
    return lax.bitcast_convert_type(signed, jnp.float32)


@functools.cache
def _narrowest_dtype(grid: Float) -> np.dtype:
    """The narrowest storage dtype that represents all values of a grid."""
    values = np.array(grid.magnitudes)
    for name in _STORAGE[:-1]:
        dtype = np.dtype(jnp.dtype(name))
        if grid.bound > float(jnp.finfo(dtype).max):
            continue
        if np.array_equal(values.astype(dtype).astype(np.float64), values):
            return dtype
    return np.dtype(_STORAGE[-1])
