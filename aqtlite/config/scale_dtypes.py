"""Checks of the dtype of scales, and of what shares their float32 number."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from aqtlite.calibration import scale_grids


def checked(dtype: Any) -> np.dtype | None:
    """Normalizes `Tensor.scale_dtype`; None for float32.

    Raises:
        TypeError: if it is no dtype.
        ValueError: if scales cannot be rounded to it.
    """
    if dtype is None:
        return None
    options = ", ".join(scale_grids.DTYPES)
    try:
        found: np.dtype = jnp.dtype(dtype)
    except TypeError as error:
        raise TypeError(
            f"scale_dtype must be a dtype, one of {options}, or None, got {dtype!r}"
        ) from error
    if found == jnp.float32:
        return None
    if found.name not in scale_grids.DTYPES:
        raise ValueError(
            f"scale_dtype={found.name!r} is not available; give one of {options}, or "
            "None for float32"
        )
    return found


def check_shared_axes(
    axes: Any, dtype: np.dtype | None, *, has_one_per_row: bool, is_quantized: bool
) -> None:
    """Checks `Tensor.scale_shared_axes`.

    Args:
        axes: the field.
        dtype: dtype of the scales.
        has_one_per_row: whether the contracting axes share a scale.
        is_quantized: whether the operand is quantized.

    Raises:
        ValueError: if the field has an unknown value or no effect, or if each scale
            would have a float32 number of its own.
    """
    if axes not in (None, "per_tensor"):
        raise ValueError(
            f"scale_shared_axes={axes!r} is not known; give None for a float32 number "
            'per row, or "per_tensor" for one per array'
        )
    is_relative = dtype is not None and dtype.name in scale_grids.RELATIVE_DTYPES
    if axes is not None and is_quantized and not is_relative:
        raise ValueError(
            f"scale_shared_axes={axes!r} would have no effect, because scale_dtype="
            f"{None if dtype is None else dtype.name!r} has no float32 number beside "
            f"it; set scale_dtype to one of {', '.join(scale_grids.RELATIVE_DTYPES)}, "
            "or leave scale_shared_axes None"
        )
    if axes is None and is_relative and has_one_per_row:
        raise ValueError(
            f"scale_dtype={dtype and dtype.name!r} would have no effect, because each "
            "row has a single scale, which is a float32 number times the largest value "
            'of the dtype; set scale_shared_axes="per_tensor" for one number per '
            "array, set blocks, or leave scale_dtype None"
        )
