"""Configs of operands from the fields with which Qwix quantizes an array."""

import dataclasses
import re
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from aqtlite import calibration, config, numerics

MxScales = Literal["overflow_aware", "ceil"]
"""Scales of Qwix's mxfp8 and mxfp4; see `rules.from_qwix`."""

_BLOCK_FORMATS = {
    "mxfp8": ("float8_e4m3fn", 32),
    "mxfp8_16": ("float8_e4m3fn", 16),
    "mxfp4": ("float4_e2m1fn", 32),
    "nvfp4": ("float4_e2m1fn", 16),
}
"""Element dtypes and tile sizes of the formats whose scales are of few bits."""

_GIVEN = (calibration.Constant, calibration.ConstantRange)
"""Calibrations with fixed ranges, which read no array."""

_OF_INT16 = 32767.5 / 32768
"""Qwix maps the largest magnitude to 32768, and `numerics.IntSymmetric` to 32767.5."""


class Asked(NamedTuple):
    """How Qwix quantizes an array. Errors name the fields that say so."""

    qtype: Any
    method: Any
    tile_size: Any
    is_per_tensor: bool
    clips_gradient: bool
    names: tuple[str, str, str]
    """Names of the first three fields."""


def tensor_of(asked: Asked, mx_scales: MxScales) -> config.Tensor:
    """Returns the config of an operand.

    Raises:
        ValueError: if a field has no equivalent.
    """
    blocks = _blocks(asked)
    if asked.qtype is None:
        return config.Tensor()
    grid = _grid(asked)
    found, clips = _calibration(asked)
    is_fixed = isinstance(found, _GIVEN)
    if isinstance(found, calibration.MinMax | calibration.ConstantRange):
        grid = _with_zero_point(asked, grid)
    if clips and asked.clips_gradient:
        grid = dataclasses.replace(grid, clip_gradient=True)
    has_po2_scales = False
    if _is_block_format(asked.qtype):
        size = _BLOCK_FORMATS[asked.qtype][1]
        if asked.tile_size != size:
            raise no_equivalent(
                asked.names[0], asked.qtype, f"its tile_size is {size}, in Qwix, too"
            )
        has_po2_scales = asked.qtype != "nvfp4"
        if not has_po2_scales:
            found = calibration.RoundedScale(found)
        elif mx_scales == "overflow_aware":
            found = calibration.OverflowAware(found)
    return config.Tensor(
        numerics=grid,
        calibration=found,
        calib_shared_axes="per_tensor" if is_fixed or asked.is_per_tensor else None,
        blocks=None if is_fixed else blocks,
        po2_scale=has_po2_scales,
    )


def static(tensor: config.Tensor) -> config.Tensor:
    """Returns a config whose range is the mean over batches, unless it is fixed."""
    if not tensor.is_quantized or isinstance(tensor.calibration, _GIVEN):
        return tensor
    mean = calibration.MeanOverBatches(of=tensor.calibration)
    return dataclasses.replace(tensor, calibration=mean)


def _calibration(asked: Asked) -> tuple[calibration.Calibration, bool]:
    """Returns a calibration, and whether it clips."""
    _, method, _ = asked.names
    text = asked.method or "absmax"
    name, numbers = _parsed(method, text)
    wider = _OF_INT16 if _name_of(asked.qtype) == "int16" else 1.0
    match name, numbers:
        case "absmax", [] if wider == 1:
            return calibration.AbsMax(), False
        case "absmax", ([] | [_]):
            scale = numbers[0] if numbers else 1.0
            return calibration.AbsMax(clipping_scale=scale * wider), scale < 1
        case "rms", [factor]:
            return calibration.RMS(factor * wider), True
        case "fixed", ([_] | [_, _]):
            low, high = numbers if len(numbers) == 2 else (-numbers[0], numbers[0])
            if low == -high:
                return calibration.Constant(high * wider), True
            return calibration.ConstantRange(min=low, max=high), True
        case "minmax", []:
            return calibration.MinMax(), False
        case "minmax", [scale]:
            return calibration.MinMax(clipping_scale=scale), scale < 1
    raise no_equivalent(
        method,
        text,
        "write absmax, minmax (either of them with ,<scale>), rms,<factor>, "
        "fixed,<bound> or fixed,<min>,<max>; aqtlite.calibration has others, for the "
        "rules that this returns",
    )


def _is_block_format(qtype: Any) -> bool:
    return isinstance(qtype, str) and qtype in _BLOCK_FORMATS


def _name_of(qtype: Any) -> str:
    """Returns the name of a dtype, and text and what is none as text."""
    if isinstance(qtype, str):
        return qtype
    try:
        return str(jnp.dtype(qtype).name)
    except TypeError:  # Which refuses what is no dtype.
        return str(qtype)


def _grid(asked: Asked) -> Any:
    """Returns the grid of a qtype."""
    dtype = _name_of(asked.qtype)
    if dtype == "nf4":
        return numerics.NormalFloat()
    dtype, _ = _BLOCK_FORMATS.get(dtype, (dtype, 0))
    if match := re.fullmatch("int([2-8]|16)", dtype):
        return numerics.IntSymmetric(bits=int(match[1]))
    if re.fullmatch("float[48]_.*", dtype):
        return numerics.Float.from_dtype(dtype)
    raise no_equivalent(
        asked.names[0],
        asked.qtype,
        "name one of int2 to int8, int16, a float8 or float4 dtype, nf4, "
        f"{', '.join(_BLOCK_FORMATS)}",
    )


def _with_zero_point(asked: Asked, grid: Any) -> numerics.IntAffine:
    if not isinstance(grid, numerics.IntSymmetric) or grid.bits not in (4, 8):
        raise no_equivalent(
            asked.names[1],
            asked.method,
            "a zero point needs int8 or int4 here; Qwix has one of int16, too",
        )
    return numerics.IntAffine(bits=grid.bits, signed=True)


def _blocks(asked: Asked) -> config.Blocks | None:
    """Returns the blocks of a tile size: a block size, or 1 / number of blocks."""
    size = asked.tile_size
    if not size:
        return None
    if asked.is_per_tensor:
        raise no_equivalent(
            "disable_channelwise_axes",
            True,
            f"{asked.names[2]} has a scale for each row of a tile: leave one of them "
            "out",
        )
    if isinstance(size, int):
        return config.Blocks(size=size, span_others=True)
    count = round(1 / size) if isinstance(size, float) else 0
    if abs(count * size - 1) > 1e-6 if count else True:
        remedy = "write an int, or 1 / <number of tiles>"
        raise no_equivalent(asked.names[2], size, remedy)
    return config.Blocks(count=count, span_others=True)


def _parsed(name: str, text: Any) -> tuple[str, list[float]]:
    """Splits a calibration method into its name and numbers."""
    method, *numbers = str(text).lower().split(",")
    try:
        return method, [float(number) for number in numbers]
    except ValueError as error:
        raise no_equivalent(name, text, "write numbers behind the commas") from error


def no_equivalent(name: str, value: Any, remedy: str) -> ValueError:
    """Returns the error about a field of Qwix that has no equivalent."""
    return ValueError(f"from_qwix: {name}={value!r} has no equivalent: {remedy}")
