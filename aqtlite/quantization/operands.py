"""Quantization of one array by one `Tensor` config: alone, or as an operand."""

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite import config, noise
from aqtlite.calibration import counting
from aqtlite.lowering import exact
from aqtlite.operations import OperandAxes
from aqtlite.qtensor.qtensor import Operand, QTensor
from aqtlite.quantization import granularity, padding, quantizer, statistics
from aqtlite.quantization.fixed_scale import FixedScale
from aqtlite.shapes import block_shapes
from aqtlite.shapes.dimension_numbers import Axes


class Seeds(NamedTuple):
    """The origin of the seeds of one operand's noise."""

    seed: jax.Array | None = None
    """uint32 of shape ``(2,)``; None seeds each channel from its calibration."""

    forward_scales: tuple[jax.Array, ...] = ()
    """More to seed a channel from, laid out as the operand."""

    salt: int | None = None
    """Tells the noise of this operand from that of the others; None for one alone."""

    def of_channels(self, found: tuple[jax.Array, ...]) -> jax.Array:
        """The seeds of the channels of which calibration found these bounds."""
        seed = self.seed
        if seed is None:
            local = [
                scale
                for scale in self.forward_scales
                if all(map(_broadcasts, scale.shape, found[0].shape))
            ]
            seed = noise.seed_from_bounds(*found, *local)
        return seed if self.salt is None else noise.fold_in(seed, self.salt)


_NO_SEEDS = Seeds()


def _broadcasts(size: int, wanted: int) -> bool:
    """Returns True if an axis of this size, which may be symbolic, broadcasts."""
    return size in (1, wanted)


def quantize(
    x: Any,
    tensor_config: config.Tensor,
    axes: int | Sequence[int],
    key: jax.Array | None = None,
    *,
    window: Sequence[int] = (),
) -> QTensor:
    """Quantizes an array.

    Args:
        x: float32, bfloat16, float16 or float64, any shape.
        tensor_config: the grid, the calibration and the granularity.
        axes: the axes to be contracted, which share a scale unless
            ``tensor_config.calib_shared_axes`` says otherwise.
        key: a `jax.random` key for stochastic rounding. Without one the noise is
            seeded, for each channel, from the bits of the bound that calibration
            found for it.
        window: those of `axes` that are the window of a convolution, which
            ``tensor_config.blocks`` leaves whole.

    Returns:
        A `QTensor` of x's shape; its scale is float32, with size 1 along the axes
        that share one. A channel of zeros has scale 1. A NaN or an infinity makes
        the scale of its channel NaN, so that the whole channel dequantizes to NaN, as
        it would poison a float contraction; except with `calibration.Constant`, which
        looks at no element.

    Raises:
        TypeError: if x is not floating, or `tensor_config` not a `config.Tensor`.
        ValueError: if the config does not quantize, or an axis is out of range.

    >>> from aqtlite import numerics
    >>> int4 = config.Tensor(numerics=numerics.IntSymmetric(bits=4))
    >>> quantize(jnp.array([3.0, -1.5, 0.1]), int4, 0).qvalue.tolist()
    [7, -4, 0]
    """
    if not isinstance(tensor_config, config.Tensor):
        raise TypeError(
            f"tensor_config must be a config.Tensor, got {type(tensor_config).__name__}"
        )
    _ = tensor_config.grid  # Raises if there is none.
    if isinstance(x, QTensor):
        raise TypeError("quantize takes a float array, and x is a QTensor; dequant it")
    x = jnp.asarray(x)
    quantizer.check_floating(x, "x")
    try:
        sequence = axes if isinstance(axes, Iterable) else (axes,)
        contracting = tuple(operator.index(axis) for axis in sequence)
    except TypeError as error:
        raise TypeError(
            f"axes must be an int or a sequence of ints, got {axes!r}"
        ) from error
    seed = None if key is None else noise.seed_from_key(key)
    contracting = granularity.normalize_axes(contracting, x.shape, "axes")
    of_x = OperandAxes.of_contracting(x.ndim, contracting)
    of_x = of_x._replace(window=_window(window, contracting, x.shape))
    if tensor_config.calibration.has_state:
        raise ValueError(
            f"tensor_config.calibration={tensor_config.calibration!r} needs statistics "
            "of several batches; quantize with calibration.AbsMax() or another that "
            "looks at the array alone"
        )
    if tensor_config.calibration.is_learned:
        raise ValueError(
            f"tensor_config.calibration={tensor_config.calibration!r} is learned, and "
            "its parameters are trained in a contraction; quantize with "
            "calibration.AbsMax() or another that looks at the array alone"
        )
    given, x = x, padding.pad_array(x, tensor_config, of_x, "tensor_config")
    q = quantize_array(x, tensor_config, of_x, "tensor_config", Seeds(seed))
    return dataclasses.replace(q, padding=padding.widths(x, like=given))


def _window(
    window: Sequence[int], contracting: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[int, ...]:
    """The axes of a window, counted from the front.

    Raises:
        ValueError: if one is not contracted.
    """
    found = granularity.normalize_axes(tuple(window), shape, "window")
    if not set(found) <= set(contracting):
        raise ValueError(
            f"window={tuple(window)} must be some of axes={contracting}, the "
            f"contracting axes of x, of shape {shape}"
        )
    return found


def quantize_array(
    x: jax.Array,
    tensor: config.Tensor,
    axes: OperandAxes,
    path: str,
    seeds: Seeds = _NO_SEEDS,
    state: Any = (),
) -> QTensor:
    """Quantizes an array, whoever asks: calibrates, seeds the noise, and rounds.

    Args:
        x: Floating array.
        tensor: Config that quantizes it.
        axes: Axes of the array.
        path: Path of `tensor` in its config, for error messages.
        seeds: Seeds of stochastic rounding.
        state: Statistics or learned parameters of the calibration, or the `FixedScale`
            in the place of statistics; ``()`` for a calibration without a state.
    """
    calibrated = calibrate(x, tensor, axes, path, state)
    if tensor.scale_stop_grad:
        calibrated = calibrated._replace(scale=lax.stop_gradient(calibrated.scale))
    seed = None
    if tensor.needs_noise:
        shared = granularity.noise_axes(tensor, x.shape, path)
        seed = seeds.of_channels(lax.stop_gradient(calibrated.found))
        seed = noise.shared_along(seed, shared)
    return quantizer.round_to_grid(x, calibrated, tensor, seed)


def quantize_operand(
    x: Operand,
    tensor: config.Tensor,
    axes: OperandAxes,
    path: str,
    seeds: Seeds = _NO_SEEDS,
    state: Any = (),
) -> QTensor | None:
    """Quantizes one operand of a contraction; None if it stays in floating point.

    The arguments are those of `quantize_array`; a `QTensor` stays as it is.

    Raises:
        ValueError: if the scale varies along contracting axes where it could not be
            taken out of the sum.
    """
    if isinstance(x, QTensor):
        _check_scale(x.scale.shape, tensor, axes, path)
        return x
    if not tensor.is_quantized:
        return None
    q = quantize_array(x, tensor, axes, path, seeds, state)
    _check_scale(q.scale.shape, tensor, axes, path)
    return q


def calibrate(
    x: jax.Array,
    tensor: config.Tensor,
    axes: OperandAxes,
    path: str,
    state: Any = (),
) -> quantizer.Calibrated:
    """Finds the scale of an array that is quantized, from its state if it has one.

    Before the first batch of statistics it raises, or gives NaN scales under `jax.jit`.
    The arguments are those of `quantize_array`.
    """
    if tensor.calibration.has_state:
        statistics.check_ready(tensor, state, path)
        if isinstance(state, FixedScale):
            return state.calibrated(x, tensor, axes, path)
        calibrated = quantizer.calibrate(x, tensor, axes, path, state)
        is_known = counting.is_of_batches(state.batches)
        scale = jnp.where(is_known, calibrated.scale, jnp.nan)
        return calibrated._replace(scale=scale)
    if tensor.calibration.is_learned:
        statistics.check_given(tensor, state, path)
        return quantizer.calibrate(x, tensor, axes, path, state)
    return quantizer.calibrate(x, tensor, axes, path)


def with_sums(q: QTensor, contracting: Axes) -> QTensor:
    """Adds what a contraction with an operand with a zero point needs of this one.

    Args:
        q: on a grid of integers, its axes in their own order.
        contracting: its contracting axes. Where the scale varies along them, the
            contraction is cut into tiles, and nothing is added.
    """
    if any(q.scale.shape[axis] > 1 for axis in contracting):
        return q
    values = q.qvalue.astype(jnp.int32)
    if q.zero_point is not None:
        values = values - block_shapes.repeat(
            q.zero_point, q.qvalue.shape, range(q.ndim)
        )
    return dataclasses.replace(q, sums=values.sum(contracting, keepdims=True))


def with_fusion_barrier(q: QTensor) -> QTensor:
    """Keeps XLA from fusing the scale's computation into what reads it."""
    zero_point = q.zero_point
    if zero_point is not None:
        zero_point = exact.fusion_barrier(zero_point)
    scale = exact.fusion_barrier(q.scale)
    return dataclasses.replace(q, scale=scale, zero_point=zero_point)


def _check_scale(
    scale_shape: tuple[int, ...], tensor: config.Tensor, axes: OperandAxes, path: str
) -> None:
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


def wide_dtype(dtype: np.dtype) -> np.dtype:
    """Returns float32, or float64 for float64."""
    return np.dtype("float64") if dtype == np.float64 else np.dtype("float32")
