"""Calibration to power-of-two scales that may clip the largest magnitude a little."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.calibration import changed_range
from aqtlite.numerics import Float, Numerics

_EXPONENT = np.int32(0xFF << 23)
_HALF_OF_BFLOAT16 = np.int32(1 << 15)


@dataclasses.dataclass(frozen=True)
class OverflowAware(changed_range.ChangedRange):
    """Power-of-two scales for floats that clip by less than half of a step.

    With ``m`` mantissa bits, the scale is the smallest power of two by which the bound
    of `of` is less than ``r = (2^(m + 1) - 1/2) / (2^(m + 1) - 1)`` times the largest
    value of the grid: 7 for E2M1, whose largest value is 6. Up to there, a grid with
    one more exponent would round down, too. A scale that clips nothing is twice as
    large for many blocks, and loses small values for that (arXiv:2603.08713). On other
    grids ``r`` is 1. As in Qwix's MXFP4 and MXFP8, bounds are compared in
    bfloat16. For ``po2_scale=True`` or ``scale_dtype="float8_e8m0fnu"``, of which the
    latter stores a scale in 8 bits.

    >>> import aqtlite
    >>> from aqtlite import calibration, config, numerics
    >>> grid = numerics.Float.from_dtype("float4_e2m1fn")
    >>> x = jnp.array([[6.9, 0.3], [7.1, 0.3]])
    >>> for how in (OverflowAware(), calibration.AbsMax()):
    ...     tensor = config.Tensor(numerics=grid, calibration=how, po2_scale=True)
    ...     print(aqtlite.quantize(x, tensor, 1).scale.tolist())
    [[1.0], [2.0]]
    [[2.0], [2.0]]

    Raises:
        TypeError: if `of` is not a calibration.
        ValueError: if `of` gathers statistics or is learned.
    """

    def changed(self, bound: jax.Array, grid: Numerics) -> jax.Array:
        # The scale of the largest power of two on the grid is itself one.
        top = 2.0 ** (math.frexp(grid.bound)[1] - 1)
        half = bound * np.float32(top / (grid.bound * _excess(grid)))
        bits = lax.bitcast_convert_type(half, jnp.int32) + _HALF_OF_BFLOAT16
        power = 2 * lax.bitcast_convert_type(bits & _EXPONENT, jnp.float32)
        limits = jnp.finfo(jnp.float32)
        return jnp.clip(power, limits.tiny, limits.max)


def _excess(grid: Numerics) -> float:
    if not isinstance(grid, Float):
        return 1.0
    last = 2.0 ** (grid.mantissa_bits + 1) - 1
    return (last + 0.5) / last
