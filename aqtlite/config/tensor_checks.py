"""Checks of the fields of a `Tensor`, each alone and then in combination."""

import math
import numbers
import re
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from aqtlite import calibration as calibrations
from aqtlite import noise as noises
from aqtlite import numerics as grids
from aqtlite.config import scale_dtypes
from aqtlite.config.blocks import Blocks
from aqtlite.config.double_scales import DoubleScales
from aqtlite.config.rounding import Gptq
from aqtlite.config.sparsity import NofM
from aqtlite.numerics import fields

if TYPE_CHECKING:
    from aqtlite.config.tensor import SharedAxes, Tensor

_FLAGS = ("scale_stop_grad", "po2_scale", "use_fake_quant", "use_fwd_quant", "find_nan")

OF_GRID = (
    "calib_shared_axes",
    "noise_shared_axes",
    "blocks",
    "scale_dtype",
    "scale_shared_axes",
    "po2_scale",
    "use_fake_quant",
    "find_nan",
    "double_scales",
    "rounding",
    "sparsity",
)
"""Fields that have no effect, and must have their defaults, without a grid."""

_TYPES = {
    "calibration": fields.instance(
        calibrations.Calibration,
        "an aqtlite.calibration.Calibration such as AbsMax()",
    ),
    "noise": fields.instance(
        noises.Noise, "an aqtlite.noise.Noise such as CounterHash()"
    ),
    "blocks": fields.instance(Blocks | None, "a config.Blocks or None"),
    "double_scales": fields.instance(
        DoubleScales | None, "a config.DoubleScales or None"
    ),
    "rounding": fields.instance(Gptq | None, "a config.Gptq or None"),
    "sparsity": fields.instance(NofM | None, "a config.NofM or None"),
    **dict.fromkeys(_FLAGS, fields.flag),
}


def check_types(tensor: "Tensor") -> None:
    """Raises TypeError for a field of another type, ValueError for an invalid grid."""
    if not isinstance(tensor.numerics, grids.Numerics | grids.NoNumerics):
        raise TypeError(
            "numerics must be an aqtlite.numerics.Numerics such as "
            f"IntSymmetric(bits=8), or NoNumerics(), got {tensor.numerics!r}"
            f"{_grid_of_name(tensor.numerics)}"
        )
    for name, check in _TYPES.items():
        check(getattr(tensor, name), name)
    if isinstance(tensor.numerics, grids.Numerics):
        _check_grid(tensor.numerics)
    if not isinstance(tensor.noise, Hashable):
        raise TypeError(
            f"noise: {type(tensor.noise).__name__} must be a frozen dataclass, so "
            "that configs can be compared and hashed; decorate it with "
            "@dataclasses.dataclass(frozen=True)"
        )


def normalized(tensor: "Tensor") -> dict[str, Any]:
    """Returns the fields that may be given in several forms, in one.

    Raises:
        TypeError: if axes are not a tuple or list of ints.
        ValueError: if they are empty, repeated or unknown, or a dtype holds no scales.
    """
    noise_axes: object = tensor.noise_shared_axes
    if noise_axes is not None:
        remedy = "give a tuple of axes, or None for noise of each element's own"
        noise_axes = _checked_axes(noise_axes, "noise_shared_axes", remedy)
    return {
        "calib_shared_axes": _shared_axes(tensor.calib_shared_axes),
        "noise_shared_axes": noise_axes,
        "scale_dtype": scale_dtypes.checked(tensor.scale_dtype),
    }


def check_combinations(tensor: "Tensor") -> None:
    """Raises ValueError for fields that contradict each other or have no effect."""
    _check_noise_shared_axes(tensor)
    _check_scales(tensor)
    if tensor.is_quantized:
        _check_blocks(tensor)
        _check_learned(tensor)
        _check_moving_scale(tensor)
    else:
        _check_nothing_to_quantize(tensor)


def _check_nothing_to_quantize(tensor: "Tensor") -> None:
    for name in OF_GRID:
        value = getattr(tensor, name)
        if value is not None and value is not False:
            raise ValueError(
                f"{name}={value!r} would have no effect, because "
                "numerics is NoNumerics() and nothing is quantized; set numerics, "
                f"or leave {name} at its default"
            )


def _check_noise_shared_axes(tensor: "Tensor") -> None:
    if tensor.noise_shared_axes is not None and not tensor.needs_noise:
        raise ValueError(
            f"noise_shared_axes={tensor.noise_shared_axes} would have no effect, "
            "because rounding is to the nearest value; set numerics to a grid with "
            "stochastic_rounding=True, or leave noise_shared_axes None"
        )


def _check_scales(tensor: "Tensor") -> None:
    scale_dtypes.check_shared_axes(
        tensor.scale_shared_axes,
        tensor.scale_dtype,
        has_one_per_row=tensor.blocks is None and tensor.calib_shared_axes is None,
        is_quantized=tensor.is_quantized,
    )
    if tensor.po2_scale and tensor.scale_dtype not in (None, jnp.float8_e8m0fnu):
        raise ValueError(
            f"po2_scale=True makes scales powers of two, and scale_dtype="
            f"{np.dtype(tensor.scale_dtype).name!r} rounds them otherwise; leave one "
            "of them at its default, or set scale_dtype='float8_e8m0fnu'"
        )


def _check_blocks(tensor: "Tensor") -> None:
    if tensor.blocks is None:
        return
    if tensor.calib_shared_axes is not None:
        raise ValueError(
            f"blocks={tensor.blocks!r} and calib_shared_axes="
            f"{tensor.calib_shared_axes!r} both say what shares a scale; leave one "
            "of them None"
        )
    if tensor.noise_shared_axes is not None:
        raise ValueError(
            f"blocks={tensor.blocks!r} and noise_shared_axes="
            f"{tensor.noise_shared_axes!r}: noise that axes share is not available "
            "for blocks; leave one of them None"
        )
    if tensor.blocks.pad and not tensor.calibration.ignores_zeros:
        raise ValueError(
            f"blocks={tensor.blocks!r} with calibration={tensor.calibration!r}: zeros "
            "that pad a block would change its scale. Use calibration.AbsMax(), "
            "calibration.MinMax() or calibration.Constant(...), or "
            "Blocks(fit=True)"
        )
    if tensor.calibration.has_state:
        raise ValueError(
            f"blocks={tensor.blocks!r} with calibration={tensor.calibration!r}, which "
            "gathers statistics: blocks have none. Use a calibration that looks at "
            "the array alone, such as calibration.AbsMax(), or leave blocks None"
        )


def _check_learned(tensor: "Tensor") -> None:
    grid = tensor.grid
    if tensor.calibration.is_learned and (
        grid.calibrated_range != grid.zero_point_range
    ):
        raise ValueError(
            f"calibration={tensor.calibration!r} is learned, and its step is a scale "
            f"of the stored values {grid.zero_point_range}, but numerics={grid!r} "
            f"maps ranges onto {grid.calibrated_range}; set "
            "stochastic_rounding=False, or use a grid without a zero point, such "
            "as numerics.IntSymmetric(bits=8, stochastic_rounding=True)"
        )


def _check_moving_scale(tensor: "Tensor") -> None:
    if not tensor.scale_moves:
        return
    if tensor.calibration.needs_state:
        raise ValueError(
            f"calib_shared_axes='remaining' with calibration={tensor.calibration!r}: "
            "each contracted element has a scale, found from the array alone. Use "
            "calibration.AbsMax(), for instance, or calib_shared_axes='per_tensor'"
        )
    if tensor.scale_dtype is not None and tensor.has_relative_scales:
        raise ValueError(
            f"calib_shared_axes='remaining' with scale_dtype="
            f"{tensor.scale_dtype.name!r}, which rounds scales relative to the "
            "largest one: they would depend on one another. Use 'bfloat16', "
            "'float8_e8m0fnu' or None"
        )


def _shared_axes(axes: object) -> "SharedAxes":
    """Normalizes `calib_shared_axes`."""
    if axes is None or axes == "per_tensor" or axes == "remaining":
        return axes
    remedy = (
        'give a tuple of axes, "per_tensor", "remaining", or None for the contracting '
        "axes"
    )
    if isinstance(axes, str):
        raise ValueError(f"calib_shared_axes={axes!r} is not known; {remedy}")
    return _checked_axes(axes, "calib_shared_axes", remedy)


def _checked_axes(axes: object, name: str, remedy: str) -> tuple[int, ...]:
    """Returns axes as a tuple; raises TypeError or ValueError if they are none."""
    if not isinstance(axes, tuple | list):
        raise TypeError(f"{name}={axes!r} is not a tuple; {remedy}")
    for axis in axes:
        if isinstance(axis, bool) or not isinstance(axis, numbers.Integral):
            raise TypeError(
                f"{name}={axes!r} holds {axis!r}, which is not an int; {remedy}"
            )
    if not axes:
        raise ValueError(f"{name} is empty; {remedy}")
    if len(set(axes)) < len(axes):
        raise ValueError(f"{name}={axes!r} repeats an axis; name each once")
    return tuple(int(axis) for axis in axes)


def _grid_of_name(name: object) -> str:
    """Suggests the grid that a dtype or dtype name was meant to be."""
    text = getattr(name, "name", getattr(name, "__name__", name))
    if not isinstance(text, str):
        return ""
    if integer := re.fullmatch(r"(u?)int(\d+)", text):
        grid = "IntAffine" if integer[1] else "IntSymmetric"
        return f"; {text} is numerics.{grid}(bits={integer[2]})"
    if re.fullmatch(r"float[468]_\w+", text):
        return f"; {text} is numerics.Float.from_dtype({text!r})"
    if text in ("fp8", "float8"):
        return "; fp8 is numerics.Float.from_dtype('float8_e4m3fn')"
    return ""


def _check_grid(grid: grids.Numerics) -> None:
    """Raises TypeError or ValueError for an invalid grid, perhaps of a user's class."""
    name = type(grid).__name__
    if not isinstance(grid, Hashable):
        raise TypeError(
            f"numerics: {name} must be a frozen dataclass, so that configs can be "
            "compared and hashed; decorate it with @dataclasses.dataclass(frozen=True)"
        )
    if grid.arithmetic not in ("integer", "float", "table"):
        raise ValueError(
            f"numerics: {name}.arithmetic must be 'integer', 'float' or 'table', got "
            f"{grid.arithmetic!r}"
        )
    bound = grid.bound
    if not isinstance(bound, int | float) or not 0 < bound < math.inf:
        raise ValueError(
            f"numerics: {name}.bound must be a positive, finite number, got {bound!r}"
        )
    storage = np.dtype(grid.storage_dtype)
    is_integer = jnp.issubdtype(storage, jnp.integer)
    if grid.arithmetic == "integer" and not (
        is_integer and jnp.iinfo(storage).bits <= 16
    ):
        raise ValueError(
            f"numerics: {name}.arithmetic is 'integer', which takes storage of up to "
            f"16 bits, but {name}.storage_dtype is {storage.name}"
        )
    if grid.arithmetic == "float" and not jnp.issubdtype(storage, jnp.floating):
        raise ValueError(
            f"numerics: {name}.arithmetic is 'float', but {name}.storage_dtype is "
            f"{storage.name}"
        )
    if grid.zero_point_range is not None:
        smallest, largest = grid.zero_point_range
        limits = jnp.iinfo(storage) if is_integer else None
        if limits is None or not limits.min <= smallest < largest <= limits.max:
            raise ValueError(
                f"numerics: {name}.zero_point_range={grid.zero_point_range} is not a "
                f"range of {storage.name}, its storage_dtype"
            )
    elif grid.arithmetic == "integer" and grid.bound / grid.unit > (
        jnp.iinfo(storage).max + 1
    ):
        raise ValueError(
            f"numerics: {name}.bound={bound} is beyond the values of {storage.name}, "
            "its storage_dtype"
        )
