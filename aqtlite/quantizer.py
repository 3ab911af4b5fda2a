"""One `Tensor` config applied to one array.

All arithmetic is float32 and leaves a compiler no choice, so that one array and one
config give the same integers and scales in every program. What that takes:

- no arithmetic in bfloat16 or float16, whose intermediate roundings XLA may drop;
- values whose origin the compiler does not see (`exact`), so that it neither moves a
  factor from the array's producer into the scale nor skips a rounding;
- no division by a constant (`calibration.scale_from_bound`), and no sum of a product,
  which may be contracted (`numerics.IntSymmetric` compares with its noise).
"""

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite import calibration, config, noise, numerics
from aqtlite.lowering import exact
from aqtlite.qtensor import QTensor

# Of finite values, no scale on a grid that reaches so far has a subnormal reciprocal.
_SAFE_BOUND = 4.0


def quantize(
    x: Any,
    tensor_config: config.Tensor,
    axes: int | Sequence[int],
    key: jax.Array | None = None,
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

    Returns:
        A `QTensor` of x's shape; its scale is float32, with size 1 along the axes
        that share one. A channel of zeros has scale 1. A NaN or an infinity makes
        the scale of its channel NaN, so that the whole channel dequantizes to NaN, as
        it would poison a float contraction.

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
    x = jnp.asarray(x)
    check_floating(x, "x")
    try:
        sequence = axes if isinstance(axes, Iterable) else (axes,)
        contracting = tuple(operator.index(axis) for axis in sequence)
    except TypeError as error:
        raise TypeError(
            f"axes must be an int or a sequence of ints, got {axes!r}"
        ) from error
    seed = None if key is None else noise.seed_from_key(key)
    contracting = _normalize_axes(contracting, x.shape, "axes")
    bound, scale = calibrate(x, tensor_config, contracting, "tensor_config")
    if tensor_config.scale_stop_grad:
        scale = lax.stop_gradient(scale)
    if tensor_config.needs_noise and seed is None:
        seed = noise.seed_from_bounds(lax.stop_gradient(bound))
    return round_to_grid(x, scale, tensor_config, seed)


@functools.partial(jax.jit, static_argnames=("tensor_config", "contracting", "path"))
def calibrate(
    x: jax.Array, tensor_config: config.Tensor, contracting: tuple[int, ...], path: str
) -> tuple[jax.Array, jax.Array]:
    """The bound that the grid has to reach, and the scale of the stored values.

    Args:
        x: floating, any shape.
        tensor_config: calibration, granularity and grid.
        contracting: the axes that share a scale by default.
        path: where the config stands, for error messages.

    Returns:
        Both float32, keepdims.
    """
    shared = shared_axes(tensor_config, x.shape, contracting, path)
    bound = tensor_config.calibration.bound(exact.float32(x), shared)
    grid = tensor_config.grid
    scale = calibration.scale_from_bound(bound, grid.bound, grid.unit)
    if tensor_config.po2_scale:
        scale = calibration.ceil_to_power_of_two(scale)
    return bound, scale


def scaled(x: jax.Array, scale: jax.Array, grid: numerics.Numerics) -> jax.Array:
    """An array as the grid sees it: float32, times the reciprocal of its scale.

    Args:
        x: floating, any shape.
        scale: that of the stored values, keepdims.
        grid: the grid.
    """
    values = exact.opaque(exact.float32(x))
    if grid.bound < _SAFE_BOUND:
        # The reciprocal of a large scale would be subnormal.
        shrink = jnp.where(scale > 2.0**64, jnp.float32(2.0**-32), jnp.float32(1))
        values, scale = values * shrink, scale * shrink
    return values * (jnp.float32(grid.unit) / scale)


@functools.partial(jax.jit, static_argnames="tensor_config")
def round_to_grid(
    x: jax.Array,
    scale: jax.Array,
    tensor_config: config.Tensor,
    seed: jax.Array | None,
) -> QTensor:
    """Rounds an array with a scale that is known.

    Args:
        x: floating, any shape.
        scale: float32, keepdims.
        tensor_config: names the grid.
        seed: of the noise, None for a grid that needs none; see `noise.random_bits`.
    """
    grid = tensor_config.grid
    bits = None if seed is None else noise.random_bits(x.shape, seed)
    return QTensor(grid.round(scaled(x, scale, grid), bits), scale, x.dtype)


def shared_axes(
    tensor_config: config.Tensor,
    shape: Sequence[int],
    contracting: tuple[int, ...],
    path: str,
) -> tuple[int, ...]:
    """The axes along which an operand has one scale.

    Raises:
        ValueError: if ``calib_shared_axes`` names an axis that the operand lacks or
            names one twice.
    """
    shared = tensor_config.calib_shared_axes
    if shared is None:
        return contracting
    if shared == "per_tensor":
        return tuple(range(len(shape)))
    return _normalize_axes(shared, shape, f"{path}.calib_shared_axes")


def _normalize_axes(
    axes: tuple[int, ...], shape: Sequence[int], what: str
) -> tuple[int, ...]:
    ndim = len(shape)
    if any(not -ndim <= axis < ndim for axis in axes):
        raise ValueError(
            f"{what}={axes} names an axis that an operand of shape {tuple(shape)} "
            "does not have"
        )
    normalized = tuple(axis % ndim for axis in axes)
    if len(set(normalized)) != len(normalized):
        raise ValueError(
            f"{what}={axes} names an axis of an operand of shape {tuple(shape)} twice"
        )
    return normalized


def check_floating(x: jax.Array, what: str) -> None:
    """Raises TypeError unless x is float32, bfloat16, float16 or float64."""
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64):
        raise TypeError(
            f"{what} must be float32, bfloat16, float16 or float64 to be quantized, "
            f"got {x.dtype} of shape {x.shape}; cast it first, or leave this "
            "contraction unquantized"
        )
