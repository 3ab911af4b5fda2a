"""Checks of operands, and of what calibrations, grids and noise return."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import calibration, config, errors
from aqtlite.operations import OperandAxes
from aqtlite.shapes import dimension_numbers as dn


def check_range(
    found: Any,
    tensor_config: config.Tensor,
    shape: tuple[int, ...],
    shared: tuple[int, ...],
    path: str,
) -> None:
    """Checks the range that a calibration, perhaps a user's own, returned."""
    name = type(tensor_config.calibration).__name__
    where = f"{path}.calibration: {name}.bound or .range"
    if not isinstance(found, calibration.Range):
        raise TypeError(
            f"{path}.calibration: {name}.range must return a calibration.Range, got "
            f"{found!r}"
        )
    wanted = dn.shared_shape(shape, shared)
    shapes = {tuple(np.shape(x)) for x in found if x is not None}
    if tensor_config.calibration.needs_state and shapes != {tuple(wanted)}:
        given = " and ".join(map(str, sorted(shapes)))
        what = "parameters" if tensor_config.is_learned else "statistics"
        raise ValueError(
            f"{path}.calibration={tensor_config.calibration!r} was given {what} for "
            f"scales of shape {given}, and this config has scales of shape "
            f"{tuple(wanted)} for this operand: {path}.calib_shared_axes, {path}.blocks"
            " or the operand's shape was another one. Make them again"
        )
    check_array(found.high, where, wanted, np.dtype("float32"))
    if found.low is not None:
        check_array(found.low, where, wanted, np.dtype("float32"))


def check_array(x: Any, where: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Raises TypeError or ValueError unless `x` has this dtype and shape."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype")) or x.dtype != dtype:
        kind = x.dtype.name if hasattr(x, "dtype") else type(x).__name__
        raise TypeError(f"{where} must return {dtype.name}, got {kind}")
    if tuple(x.shape) != tuple(shape):
        raise ValueError(
            f"{where} must return an array of shape {tuple(shape)}, got {x.shape}"
        )


_ARRAY_PROTOCOLS = ("__jax_array__", "__array__", "__array_interface__")


def as_array(x: Any, what: str) -> jax.Array:
    """Returns `x` as an array.

    Raises:
        TypeError: if `x` is none. Other libraries' quantized arrays have a shape, too,
            and `jnp.asarray` would read them item by item, perhaps without an end.
    """
    numbers = int, float, complex, list, tuple
    if isinstance(x, numbers) or any(hasattr(x, name) for name in _ARRAY_PROTOCOLS):
        return jnp.asarray(x)
    remedy = ""
    if hasattr(x, "scale"):
        remedy = (
            "; of another library's quantized array, its integers, scale and grid make "
            "an aqtlite.QTensor"
        )
    raise TypeError(f"{what} must be an array, got {errors.class_of(x)}{remedy}")


def check_floating(x: jax.Array, what: str) -> None:
    """Raises TypeError unless `x` is float32, bfloat16, float16 or float64."""
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64):
        raise TypeError(
            f"{what} must be float32, bfloat16, float16 or float64 to be quantized, "
            f"got {x.dtype} of shape {x.shape}; cast it first, or leave this "
            "contraction unquantized"
        )


def check_scale(
    scale_shape: tuple[int, ...], tensor: config.Tensor, axes: OperandAxes, path: str
) -> None:
    """Raises ValueError if the scale of an operand cannot be taken out of the sum.

    Such a scale varies along contracting axes, but not by blocks, or along a window.
    """
    if tensor.use_fake_quant:
        return
    varying = [axis for axis in axes.contracting if scale_shape[axis] != 1]
    if tensor.blocks is None and varying:
        remedy = f"use {path}.blocks, or set {path}.use_fake_quant=True"
        raise ValueError(
            f"{path}.calib_shared_axes={tensor.calib_shared_axes} leaves a scale of "
            f"shape {scale_shape} that varies along the contracting axes {varying}: it "
            f"cannot be taken out of the sum. Share the scale along them too, {remedy}"
        )
    in_window = [axis for axis in varying if axis in axes.window]
    if in_window:
        raise ValueError(
            f"{path} is a QTensor with a scale of shape {scale_shape} that varies "
            f"along the axes {in_window}: they are the window of a convolution, along "
            "which no scale may vary. Make it by aqtlite.quantize(..., window="
            f"{axes.window})"
        )
