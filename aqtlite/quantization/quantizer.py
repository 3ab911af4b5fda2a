"""Quantization of one array by one `config.Tensor`: calibration, noise seeds, rounding.

Before: `contraction/quantized_sums.py`, which quantizes both operands.
Next: `contraction/accumulation.py`, the sums of their products.

All arithmetic is float32 and written so that XLA cannot change its result: one array
and one config give the same integers and scales in every program. That takes:

- no arithmetic in bfloat16 or float16, since XLA may drop intermediate roundings;
- barriers (`exact`), so that the compiler neither moves a factor from the array's
  producer into the scale nor skips a rounding;
- no division by a constant (`calibration.scale_from_bound`), and no sum with a product,
  which may become a fused multiply-add (`numerics.IntSymmetric` compares with its noise
  instead).

No integer is NaN: a NaN or an infinity in an array makes the bound that calibration
finds, the scale, and all results that this scale multiplies NaN. For a calibration that
finds its bound elsewhere (`is_blind`), `contraction/poison.py` looks for them.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite import calibration, config, noise, numerics
from aqtlite.calibration import counting
from aqtlite.lowering import exact, fusion
from aqtlite.lowering.elementwise import Elementwise
from aqtlite.numerics import rounding
from aqtlite.operations import OperandAxes
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization import barriers, checks, granularity, zero_channels
from aqtlite.quantization.barriers import FindReciprocal
from aqtlite.quantization.seeds import Seeds
from aqtlite.quantization.states import state_checks
from aqtlite.quantization.states.fixed_scale import FixedScale
from aqtlite.shapes import block_shapes
from aqtlite.shapes import dimension_numbers as dn
from aqtlite.shapes.dimension_numbers import Axes

SAFE_BOUND = 4.0
"""Least bound of grids on which scales of finite values have normal reciprocals."""


class Calibrated(NamedTuple):
    """The outcome of a calibration: arrays of the rank of the calibrated array."""

    bound: jax.Array
    """Largest value or magnitude found, float32."""

    scale: jax.Array
    """Scale of the stored values, float32."""

    zero_point: jax.Array | None
    """Zero point, int32; None on a grid without one."""

    low: jax.Array | None = None
    """Smallest value found, float32, for a grid with a zero point."""

    @property
    def found(self) -> tuple[jax.Array, ...]:
        """The range found, from which the noise is seeded."""
        return (self.bound,) if self.low is None else (self.bound, self.low)


_NO_SEEDS = Seeds()


def quantize_array(
    x: jax.Array,
    tensor: config.Tensor,
    axes: OperandAxes,
    path: str,
    seeds: Seeds = _NO_SEEDS,
    state: Any = (),
) -> QTensor:
    """Quantizes an array: calibrates, seeds the noise and rounds.

    Args:
        x: Floating array.
        tensor: Config of the array.
        axes: Axes of the array.
        path: Path of `tensor` in its config, for error messages.
        seeds: Seeds of stochastic rounding.
        state: Statistics or learned parameters of the calibration, or a `FixedScale` in
            place of statistics; ``()`` for a calibration without a state.

    Returns:
        A `QTensor`. Its scale and its zero point are behind barriers if those of `path`
        are (`barriers.has_barrier`), unless `state` gives them.
    """
    how = tensor.calibration
    if how.needs_state:
        calibrated = find_scale(x, tensor, axes, path, state)
        seed = _seed(x.shape, calibrated, tensor, path, seeds)
        known = _constant(calibrated, tensor)
        reciprocal = barriers.reciprocal_of_given(path, tensor)
        q = round_to_grid(x, known, tensor, seed, reciprocal)
        if isinstance(state, FixedScale) or not barriers.has_barrier(path, tensor):
            return q
        return barriers.with_fusion_barrier(q, tensor)
    *arrays, salt = seeds
    return _quantize(x, tensor, axes, path, salt, *arrays)


@functools.partial(jax.jit, static_argnames=("tensor", "axes", "path", "salt"))
def _quantize(
    x: jax.Array,
    tensor: config.Tensor,
    axes: OperandAxes,
    path: str,
    salt: int | None,
    seed: jax.Array | None,
    forward_scales: tuple[jax.Array, ...],
) -> QTensor:
    """Quantizes an array by a calibration without a state.

    The arguments are those of `quantize_array`, and the fields of `Seeds`.
    """
    calibrated = _calibrate(x, tensor, axes, path)
    seeds = Seeds(seed, forward_scales, salt)
    noise_seed = _seed(x.shape, calibrated, tensor, path, seeds)
    known = _constant(calibrated, tensor)
    reciprocal = barriers.reciprocal_for(path, tensor)
    return _round_to_grid(x, known, tensor, noise_seed, reciprocal)


def _constant(calibrated: Calibrated, tensor: config.Tensor) -> Calibrated:
    if not tensor.scale_stop_grad:
        return calibrated
    return calibrated._replace(scale=lax.stop_gradient(calibrated.scale))


def _seed(
    shape: tuple[int, ...],
    calibrated: Calibrated,
    tensor: config.Tensor,
    path: str,
    seeds: Seeds,
) -> jax.Array | None:
    """Returns the seed of an array's noise; None for a grid that needs none."""
    if not tensor.needs_noise:
        return None
    seed = seeds.of_channels(lax.stop_gradient(calibrated.found))
    if tensor.noise_shared_axes is None:
        return seed
    return noise.shared_along(seed, granularity.noise_axes(tensor, shape, path))


def seed_of(
    x: jax.Array,
    tensor: config.Tensor,
    axes: OperandAxes,
    path: str,
    seeds: Seeds,
    state: Any = (),
) -> jax.Array | None:
    """Returns the seed of an array's noise, uint32; None for a grid without any.

    The arguments are those of `quantize_array`.
    """
    if not tensor.needs_noise:
        return None
    calibrated = find_scale(x, tensor, axes, path, state)
    return _seed(x.shape, calibrated, tensor, path, seeds)


def find_scale(
    x: jax.Array,
    tensor: config.Tensor,
    axes: OperandAxes,
    path: str,
    state: Any,
) -> Calibrated:
    """Finds the scale of an array, from the state of its calibration if it has one.

    With statistics of no batch it raises, or returns NaN scales under `jax.jit`. The
    arguments are those of `quantize_array`.
    """
    how = tensor.calibration
    if how.has_state:
        kept = (x.shape[axis] for axis in (*axes.batch, *axes.remaining))
        has_results = 0 not in kept
        state_checks.check_ready(tensor, state, path, x.ndim, has_results=has_results)
        if isinstance(state, FixedScale):
            return _fixed(x, tensor, axes, path, state)
        calibrated = calibrate(x, tensor, axes, path, state)
        is_known = counting.is_of_batches(state.batches)
        scale = jnp.where(is_known, calibrated.scale, jnp.nan)
        return calibrated._replace(scale=scale)
    if not how.is_learned:
        return calibrate(x, tensor, axes, path)
    state_checks.check_learned(tensor, state, path, x.ndim)
    return calibrate(x, tensor, axes, path, state)


def _fixed(
    x: jax.Array, tensor: config.Tensor, axes: OperandAxes, path: str, state: FixedScale
) -> Calibrated:
    wanted = granularity.layout(tensor, x.shape, axes, path).scale_shape(x.shape)
    if tuple(state.scale.shape) != wanted:
        raise ValueError(
            f"{path} has a fixed scale of shape {state.scale.shape}, and an operand "
            f"of shape {x.shape} takes one of {wanted}: share the scale along all "
            f"axes that differ between batches, with {path}.calib_shared_axes"
        )
    # The scale stands in for the bound, which only seeds noise: conversion fixes no
    # scale of an operand that is rounded stochastically in serving.
    return Calibrated(state.scale, state.scale, state.zero_point)


def _calibrate(
    x: jax.Array,
    tensor_config: config.Tensor,
    axes: OperandAxes,
    path: str,
    state: Any = (),
) -> Calibrated:
    """Finds the scale of an array, and the zero point on a grid that has one.

    Args:
        x: floating, any shape.
        tensor_config: calibration, granularity and grid.
        axes: axes of the array; the contracting axes share a scale by default.
        path: path of the config, for error messages.
        state: statistics of a calibration that gathers them, or parameters of a learned
            calibration.
    """
    layout = granularity.layout(tensor_config, x.shape, axes, path)
    grid, (blocks, shared) = tensor_config.grid, layout.in_blocks(x)
    found = tensor_config.calibration.range(exact.float32(blocks), shared, grid, state)
    checks.check_range(found, tensor_config, blocks.shape, shared, path)
    scale_shared = None
    if tensor_config.scale_shared_axes is None:
        scale_shared = layout.between_blocks(axes.contracting)
    try:
        scale, zero_point = calibration.scale_and_zero_point(
            found,
            grid,
            po2=tensor_config.po2_scale,
            dtype=tensor_config.scale_dtype,
            scale_shared=scale_shared,
            empty=zero_channels.scale(tensor_config, path),
        )
    except ValueError as error:
        raise ValueError(
            f"{path}.numerics and {path}.calibration={tensor_config.calibration!r}, "
            f"for an operand of shape {x.shape}: {error}"
        ) from error
    calibrated = Calibrated(found.high, scale, zero_point, found.low)
    if not layout.cut:
        return calibrated
    scale_shape = layout.scale_shape(x.shape)
    return jax.tree.map(lambda one: one.reshape(scale_shape), calibrated)


calibrate = jax.jit(_calibrate, static_argnames=("tensor_config", "axes", "path"))


def scaled(x: jax.Array, scale: jax.Array, grid: numerics.Numerics) -> jax.Array:
    """Scales an array for its grid: float32, times the reciprocal of its scale.

    Args:
        x: floating, any shape.
        scale: scale of the stored values, which broadcasts to the array.
        grid: grid of the stored values.
    """
    return _scaled(x, scale, grid, fusion.with_reciprocal)[0]


def _scaled(
    x: jax.Array, scale: jax.Array, grid: numerics.Numerics, reciprocal: FindReciprocal
) -> tuple[jax.Array, jax.Array]:
    """Returns the array that `scaled` returns, and the scale that others are to read.

    The arguments are those of `scaled`, and how to find the reciprocal of the scale.
    """
    values, divisor = exact.float32(x), scale
    if not grid.has_zero:
        # On such a grid, a channel of zeros has a scale of 0.
        divisor = jnp.where(divisor == 0, jnp.float32(1), divisor)
    if grid.bound < SAFE_BOUND:
        # The reciprocal of a large scale would be subnormal.
        shrink = jnp.where(divisor > 2.0**64, jnp.float32(2.0**-32), jnp.float32(1))
        values = exact.algebraic_barrier(values)
        values, divisor = values * shrink, divisor * shrink
    found, factor = reciprocal(divisor, grid.unit)
    if divisor is not scale:
        found, _ = reciprocal(scale, grid.unit)
    return _PRODUCT(values, factor), found


def _product(values: jax.Array, factor: jax.Array) -> jax.Array:
    return lax.mul(exact.algebraic_barrier(values), factor)


_PRODUCT = Elementwise(_product)


def _round_to_grid(
    x: jax.Array,
    calibrated: Calibrated,
    tensor_config: config.Tensor,
    seed: jax.Array | None,
    reciprocal: FindReciprocal = fusion.with_reciprocal,
) -> QTensor:
    """Rounds an array with a known scale.

    Args:
        x: floating, any shape.
        calibrated: the scale and the zero point.
        tensor_config: grid, and the source and sharing of noise.
        seed: seed of the noise, constant along axes that share noise; None for a grid
            that needs no noise. See `noise.Noise.bits`.
        reciprocal: how to find the reciprocal of the scale. Behind a barrier, the scale
            and the zero point of the result are behind one as well.
    """
    if tensor_config.blocks is not None and block_shapes.has_blocks(
        x.shape, calibrated.scale.shape
    ):
        return _round_blocks(x, calibrated, tensor_config, seed, reciprocal)
    grid = tensor_config.grid
    bits = None if seed is None else _noise(x.shape, seed, tensor_config)
    values, scale = _scaled(x, calibrated.scale, grid, reciprocal)
    stored = grid.round(values, bits)
    dtype = grid.storage_dtype if calibrated.zero_point is None else np.dtype("int32")
    checks.check_array(stored, f"{type(grid).__name__}.round", x.shape, dtype)
    if calibrated.zero_point is not None and grid.zero_point_range is not None:
        stored = rounding.around_zero_point(
            stored, calibrated.zero_point, grid.zero_point_range
        ).astype(grid.storage_dtype)
    zero_point = calibrated.zero_point
    if zero_point is not None and scale is not calibrated.scale:
        zero_point = fusion.barrier(zero_point)
    return QTensor(stored, scale, x.dtype, zero_point=zero_point, numerics=grid)


round_to_grid = jax.jit(_round_to_grid, static_argnames=("tensor_config", "reciprocal"))


def _noise(
    shape: tuple[int, ...], seed: jax.Array, tensor_config: config.Tensor
) -> jax.Array:
    """The random bits of each element, constant along axes that share noise."""
    source, own = tensor_config.noise, shape
    if tensor_config.noise_shared_axes is not None:
        shared = granularity.noise_axes(tensor_config, shape, "tensor_config")
        own = dn.shared_shape(shape, shared)
    bits = source.bits(own, seed)
    checks.check_array(bits, f"{type(source).__name__}.bits", own, np.dtype("uint32"))
    return bits if own == shape else jnp.broadcast_to(bits, shape)


def _round_blocks(
    x: jax.Array,
    calibrated: Calibrated,
    tensor_config: config.Tensor,
    seed: jax.Array | None,
    reciprocal: FindReciprocal,
) -> QTensor:
    """Rounds an array with a scale for each block."""
    blocks = block_shapes.split(x, calibrated.scale.shape)
    of_blocks = jax.tree.map(
        lambda y: block_shapes.split_keepdims(y, x.shape), calibrated
    )
    if seed is not None and seed.ndim > 1:
        seed = block_shapes.split_keepdims(seed, x.shape, first=1)
    q = _round_to_grid(blocks, of_blocks, tensor_config, seed, reciprocal)
    scale, zero_point = jax.tree.map(
        lambda y: block_shapes.merge_keepdims(y, x.shape, calibrated.scale.shape),
        (q.scale, q.zero_point),
    )
    values = block_shapes.merge(q.qvalue, like=x)
    return dataclasses.replace(q, qvalue=values, scale=scale, zero_point=zero_point)


def with_sums(q: QTensor, contracting: Axes) -> QTensor:
    """Adds the sums of integers that the zero point of the other operand multiplies.

    Args:
        q: a `QTensor` on a grid of integers, with its axes in their own order.
        contracting: contracting axes. Where the scale varies along them, the
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
