"""NormalFloat: quantiles of a normal distribution, decoded by table."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.numerics import base, fields, rounding
from aqtlite.shapes.sharding import looked_up

_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


_TOP = np.float32(2.0**31)
_LAST_DRAW = np.nextafter(_TOP, np.float32(0))


def _draws_per_unit(low: float, high: float) -> np.float32:
    """2^31 divided by the distance between neighbouring values, rounded up.

    The distance times this factor is then at least 2^31, above every draw, so values on
    the grid stay unchanged.
    """
    distance = np.float32(np.float32(high) - np.float32(low))
    factor = np.float32(_TOP / distance)
    while np.float32(distance * factor) < _TOP:
        factor = np.nextafter(factor, np.float32(np.inf))
    return factor


def _last_below(middle: float) -> np.float32:
    """The largest float32 not above a midpoint."""
    nearest = np.float32(middle)
    if float(nearest) > middle:  # NumPy would compare in float32.
        return np.float32(np.nextafter(nearest, np.float32(-np.inf)))
    return nearest


_THRESHOLDS = tuple(
    _last_below((low + high) / 2) for low, high in itertools.pairwise(_VALUES)
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormalFloat(base.Numerics):
    """The 16 values of nf4, from -1 to 1.

    Quantiles of the standard normal distribution, scaled to end at -1 and 1, with zero,
    eight positive and seven negative values (Dettmers et al. 2023, "QLoRA: Efficient
    Finetuning of Quantized LLMs", arXiv:2305.14314, appendix E). Weights are rounded to
    the nearest value, and ties to the lower one. Stored as uint4 codes from 0 to 15,
    decoded by table and contracted in float32.

    >>> nf4 = NormalFloat()
    >>> codes = nf4.round(jnp.array([-1.0, 0.01, 0.3, 7.0]), None)
    >>> codes.astype("int32").tolist()
    [0, 7, 11, 15]
    >>> nf4.decode(codes).tolist()
    [-1.0, 0.0, 0.33791524171829224, 1.0]

    Raises:
        ValueError: if `bits` is not 4, the only width with published values.
        TypeError: if a field is of another type than declared.
    """

    bits: int = 4
    """Width of the codes: 4."""

    clip_gradient: bool = False
    """Zero the gradient of clipped elements. Set it together with a calibration that
    clips (``AbsMax(clipping_scale < 1)``)."""

    stochastic_rounding: bool = False
    """Round to one of the two neighbouring values, with a probability proportional to
    the distance from the other one, which makes rounding unbiased."""

    def __post_init__(self) -> None:
        only = ": the values of other widths are not published"
        fields.check(self, bits=fields.integer(4, 4, only))
        fields.check(self, clip_gradient=fields.flag, stochastic_rounding=fields.flag)

    @property
    def bound(self) -> float:
        return 1.0

    @property
    def storage_dtype(self) -> np.dtype:
        return np.dtype(jnp.dtype("uint4"))

    @property
    def name(self) -> str:
        return "nf4"

    @property
    def arithmetic(self) -> base.Arithmetic:
        return "table"

    @property
    def needs_noise(self) -> bool:
        return self.stochastic_rounding

    def to_nearest(self) -> "NormalFloat":
        return dataclasses.replace(self, stochastic_rounding=False)

    def round(self, scaled: jax.Array, noise: jax.Array | None) -> jax.Array:
        code = jnp.zeros(scaled.shape, jnp.int32)
        if not self.stochastic_rounding:
            for threshold in _THRESHOLDS:
                code += (scaled > threshold).astype(jnp.int32)
            return code.astype(self.storage_dtype)
        # The clip also keeps a compiler from contracting the differences below with the
        # product that made `scaled` to an FMA.
        clipped = jnp.clip(scaled.astype(jnp.float32), -1, 1)
        draw = jnp.minimum(rounding.uniform_31(rounding.given(noise)), _LAST_DRAW)
        for low, high in itertools.pairwise(_VALUES):
            # From the neighbour nearer to zero, where floats are finer.
            factor = _draws_per_unit(low, high)
            if low >= 0:
                is_above = draw < (clipped - np.float32(low)) * factor
            else:
                is_above = ~(draw < (np.float32(high) - clipped) * factor)
            code += is_above.astype(jnp.int32)
        return code.astype(self.storage_dtype)

    def decode(self, stored: jax.Array) -> jax.Array:
        # An unsigned index needs no handling of negative indices.
        return looked_up(jnp.asarray(_VALUES, jnp.float32), stored.astype(jnp.uint32))

    def gradient_mask(self, scaled: jax.Array) -> jax.Array | None:
        return jnp.abs(scaled) <= 1 if self.clip_gradient else None
