"""Calibration to scales that are values of a dtype by themselves."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.calibration import changed_range, scales
from aqtlite.lowering import float8
from aqtlite.numerics import Float, Numerics, fields


def _name(dtype: Any, where: str) -> str:
    name = fields.instance(str, "the name of a dtype")(dtype, where)
    Float.from_dtype(name)
    return str(name)


@dataclasses.dataclass(frozen=True)
class RoundedScale(changed_range.ChangedRange):
    """Scales rounded to the nearest value of a dtype, without a float32 factor.

    Unlike scales of ``scale_dtype="float8_e4m3fn"``, which share a float32 number, they
    reach from the smallest to the largest value of the dtype (2^-9 to 448), and blocks
    beyond are coarse or clipped: Qwix's NVFP4.

    >>> import aqtlite
    >>> from aqtlite import config, numerics
    >>> grid = numerics.Float.from_dtype("float4_e2m1fn")
    >>> tensor = config.Tensor(numerics=grid, calibration=RoundedScale())
    >>> aqtlite.quantize(jnp.array([6.5, 0.1]), tensor, 0).scale.tolist()
    [1.125]

    Raises:
        TypeError: if `of` is not a calibration, or `dtype` not a name.
        ValueError: if `of` gathers statistics or is learned, or if `dtype` is not one
            of a `numerics.Float`.
    """

    dtype: str = dataclasses.field(default="float8_e4m3fn", kw_only=True)
    """Dtype of the scales."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fields.check(self, dtype=_name)

    def changed(self, bound: jax.Array, grid: Numerics) -> jax.Array:
        values = Float.from_dtype(self.dtype)
        scale = scales.scale_from_bound(bound, grid.bound, grid.unit)
        rounded = float8.widened(values.round(scale, None))
        rounded = jnp.maximum(rounded, np.float32(values.smallest))
        return rounded * np.float32(grid.bound / grid.unit)
