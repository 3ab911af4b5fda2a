"""Preparation of one operand: its quantization, and its input to the dot."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite import config, noise, numerics
from aqtlite.calibration import batch_count
from aqtlite.config.arithmetic import Form
from aqtlite.lowering import exact, narrow
from aqtlite.operations import DotInput, OperandAxes
from aqtlite.qtensor.qtensor import Operand, QTensor
from aqtlite.quantization import granularity, quantizer, statistics
from aqtlite.quantization.fixed_scale import FixedScale
from aqtlite.shapes import block_shapes
from aqtlite.shapes.dimension_numbers import Axes


class Seeds(NamedTuple):
    """The origin of the seeds of one operand's noise."""

    seed: jax.Array | None
    """uint32 of shape ``(2,)``; None seeds each channel from its calibration."""

    forward_scales: tuple[jax.Array, ...]
    """More to seed a channel from, laid out as the operand."""

    salt: int
    """Tells the noise of this operand from that of the others."""

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
        return noise.fold_in(seed, self.salt)


_NO_SEEDS = Seeds(None, (), 0)


def _broadcasts(size: int, wanted: int) -> bool:
    """Returns True if an axis of this size, which may be symbolic, broadcasts."""
    return size in (1, wanted)


def quantize(
    x: Operand,
    tensor: config.Tensor,
    axes: OperandAxes,
    path: str,
    seeds: Seeds = _NO_SEEDS,
    state: Any = (),
    local_tiles: int | None = None,
) -> QTensor | None:
    """Quantizes one operand; None if it stays in floating point.

    Args:
        x: floating, or a `QTensor`, which stays as it is.
        tensor: how.
        axes: of the operand.
        path: where `tensor` stands, for error messages.
        seeds: of stochastic rounding.
        state: the statistics of a calibration that gathers them or the `FixedScale` in
            their place, or the parameters of one that is learned.
        local_tiles: into how many the first contracting axis is cut.

    Raises:
        ValueError: if the scale varies along contracting axes where it could not be
            taken out of the sum.
    """
    if isinstance(x, QTensor):
        _check_scale(x.scale.shape, tensor, axes, path)
        return x
    if not tensor.is_quantized:
        return None
    calibrated = calibrate(x, tensor, axes, path, state, local_tiles)
    if local_tiles is None:
        _check_scale(calibrated.scale.shape, tensor, axes, path)
    seed = None
    if tensor.needs_noise:
        shared = granularity.noise_axes(tensor, x.shape, path)
        seed = noise.shared_along(seeds.of_channels(calibrated.found), shared)
    return quantizer.round_to_grid(x, calibrated, tensor, seed)


def calibrate(
    x: jax.Array,
    tensor: config.Tensor,
    axes: OperandAxes,
    path: str,
    state: Any = (),
    local_tiles: int | None = None,
) -> quantizer.Calibrated:
    """Finds the scale of an array that is quantized, from its state if it has one.

    Before the first batch of statistics it raises, or gives NaN scales under `jax.jit`.
    The arguments are those of `quantize`.
    """
    if tensor.calibration.has_state:
        statistics.check_ready(tensor, state, path)
        if isinstance(state, FixedScale):
            return state.calibrated(x, tensor, axes, path)
        calibrated = quantizer.calibrate(x, tensor, axes, path, state["state"])
        is_known = batch_count.is_of_batches(state["batches"])
        scale = jnp.where(is_known, calibrated.scale, jnp.nan)
        return calibrated._replace(scale=scale)
    if tensor.calibration.is_learned:
        statistics.check_given(tensor, state, path)
        return quantizer.calibrate(x, tensor, axes, path, state)
    return quantizer.calibrate(x, tensor, axes, path, local_tiles=local_tiles)


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


def dot_input(
    x: Operand, q: QTensor | None, form: Form, in_dtype: np.dtype | None
) -> DotInput:
    """Makes the input to the dot of one operand.

    Args:
        x: the operand.
        q: its stored values, None if it stays in floating point.
        form: how it enters the dot.
        in_dtype: to which floats are cast, None for none.
    """
    if q is not None and form == "stored":
        return _stored(q)
    if q is not None and form == "narrow":
        return _narrow(q)
    values = jnp.asarray(x) if q is None else _floats(q, form)
    return DotInput(values if in_dtype is None else values.astype(in_dtype), None, None)


def _stored(q: QTensor) -> DotInput:
    """Stored integers, signed, beside their zero point."""
    values, zero_point, grid = q.qvalue, q.zero_point, q.numerics
    if values.dtype == jnp.uint8:
        # Flipping the sign bit takes 128 off; the zero point goes along.
        values = lax.bitcast_convert_type(values ^ np.uint8(128), jnp.int8)
        before = (
            jnp.zeros_like(q.scale, jnp.int32) if zero_point is None else zero_point
        )
        zero_point = before - 128
    elif jnp.issubdtype(values.dtype, jnp.unsignedinteger):
        values = values.astype(jnp.int8 if values.dtype == jnp.uint4 else jnp.int32)
    largest = int(jnp.iinfo(values.dtype).max) if grid is None else grid.largest_stored
    return DotInput(values, zero_point, largest, sums=q.sums)


def _narrow(q: QTensor) -> DotInput:
    """Stored floats of 8 bits."""
    grid = q.numerics
    if not isinstance(grid, numerics.Float):
        return DotInput(q.qvalue, None, None)
    largest = grid.bound / grid.smallest
    return DotInput(q.qvalue, None, int(largest), grid.smallest)


def as_if_given(lhs: DotInput, rhs: DotInput) -> tuple[DotInput, DotInput]:
    """Operands that are contracted alike, whether they are computed or given.

    Those that a CPU contracts as integers are so anyway.
    """
    units, largest = (lhs.unit, rhs.unit), (lhs.largest, rhs.largest)
    if narrow.units_of_integers(units, largest) is not None:
        return lhs, rhs
    left, right = (
        one._replace(values=exact.fusion_barrier(one.values)) for one in (lhs, rhs)
    )
    return left, right


def _floats(q: QTensor, form: Form) -> jax.Array:
    """The values of an operand that is not contracted as integers."""
    if form == "decoded":
        q = dataclasses.replace(q, scale=jnp.ones((1,) * q.qvalue.ndim, jnp.float32))
    # Given or made here, it is contracted as the same array.
    wide = dataclasses.replace(q, dtype=wide_dtype(q.dtype))
    return exact.fusion_barrier(wide.dequant())


def wide_dtype(dtype: np.dtype) -> np.dtype:
    """Returns float32, or float64 for float64."""
    return np.dtype("float64") if dtype == np.float64 else np.dtype("float32")
