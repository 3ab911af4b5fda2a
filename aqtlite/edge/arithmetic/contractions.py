"""Fully connected layers, convolutions and matrix products."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite import lowering
from aqtlite.edge.arithmetic import fixed_point, rescaling, scales
from aqtlite.edge.arithmetic.kernels import Kernels
from aqtlite.edge.arithmetic.rescaling import NO_CLAMP, Clamp
from aqtlite.edge.grid import Grid, Quantized
from aqtlite.lowering.forms.convolution import Convolution
from aqtlite.shapes import dimension_numbers as dn

_LARGEST = 128

_PER_BYTE = {"int4": 2, "int2": 4}

_Roundings = dict[Kernels, fixed_point.Rounding | None]
_FULLY_CONNECTED: _Roundings = {
    "xnnpack": None,
    "builtin": "upward",
    "reference": "once",
}


def fully_connected(
    x: Quantized,
    weights: Quantized,
    bias: Quantized | None,
    grid: Grid,
    clamp: Clamp = NO_CLAMP,
    kernels: Kernels = "xnnpack",
) -> jax.Array:
    """FULLY_CONNECTED: sums of products plus bias, requantized.

    TFLite runs int16, whose bias its reference kernel misreads, and weights of int4 and
    int2 whose inputs fill no whole bytes, which XNNPACK does not take.

    Args:
        x: int8 or int16, shape (..., K).
        weights: int8, int4 or int2, shape (K, N), zero point 0, scales of shape () or
            (N,). Constants; for activations, use `matmul`.
        bias: int32, shape (N,), on the grid of the sums: the product of both scales.
        grid: grid of the result.
        clamp: range of a fused activation.
        kernels: LiteRT kernels to simulate.

    Returns:
        Shape (..., N).
    """
    sums = _dot(x, weights, (((x.qvalue.ndim - 1,), (0,)), ((), ())))
    rounding = _FULLY_CONNECTED[kernels]
    is_cut = x.qvalue.shape[-1] % _PER_BYTE.get(weights.grid.dtype, 1) != 0
    if rounding is None and (is_cut or x.grid.dtype == "int16"):
        rounding = _FULLY_CONNECTED["builtin"]
    return _requantized(sums, bias, x, weights, grid, clamp, rounding)


def matmul(
    x: Quantized, y: Quantized, grid: Grid, kernels: Kernels = "xnnpack"
) -> jax.Array:
    """FULLY_CONNECTED of two activations, run by TFLite's kernels.

    The converter writes a matrix product as this operator, after a TRANSPOSE of y.

    Args:
        x: int8, shape (..., K).
        y: int8, shape (K, N).
        grid: grid of the result.
        kernels: LiteRT kernels to simulate; "xnnpack" is the same as "builtin".

    Returns:
        Shape (..., N).
    """
    kernels = "builtin" if kernels == "xnnpack" else kernels
    return fully_connected(x, y, None, grid, kernels=kernels)


def batch_matmul(
    x: Quantized, y: Quantized, grid: Grid, kernels: Kernels = "xnnpack"
) -> jax.Array:
    """BATCH_MATMUL: batched matrix products, requantized.

    XNNPACK runs int8 if y (constant or not) has zero point 0; TFLite runs the rest.
    Sums of int16 are held in 40 bits and requantized by `fixed_point.rounded_short`.

    Args:
        x: int8, shape (..., M, K), or int16 with K up to 256.
        y: shape (..., K, N), dtype and leading axes as x, per-tensor scale.
        grid: grid of the result.
        kernels: LiteRT kernels to simulate.

    Returns:
        Shape (..., M, N).

    Raises:
        ValueError: if a sum of int16 has more than 256 products.
    """
    if x.grid.dtype == "int16":
        return _batch_matmul_of_int16(x, y, grid)
    sums = _batched_dot(x, y)
    is_of_xnnpack = kernels == "xnnpack" and y.grid.zero_point == 0
    rounding: fixed_point.Rounding | None = None if is_of_xnnpack else "away"
    return _requantized(sums, None, x, y, grid, NO_CLAMP, rounding)


def conv_2d(
    x: Quantized,
    weights: Quantized,
    bias: Quantized | None,
    grid: Grid,
    strides: Sequence[int] = (1, 1),
    padding: str = "VALID",
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
    clamp: Clamp = NO_CLAMP,
    kernels: Kernels = "xnnpack",
) -> jax.Array:
    """CONV_2D and DEPTHWISE_CONV_2D: convolutions plus bias, requantized.

    Args:
        x: int8, shape (batch, height, width, channels); padded with the zero point.
        weights: int8 or int4, shape (height, width, channels / groups, N), zero point
            0, scales of shape () or (N,). A depthwise convolution has one channel per
            group.
        bias: int32, shape (N,), on the grid of the sums: the product of both scales.
        grid: grid of the result.
        strides: strides of the window.
        padding: "SAME" or "VALID".
        dilation: dilation of the window.
        groups: number of groups of channels.
        clamp: range of a fused activation.
        kernels: LiteRT kernels to simulate; with "xnnpack", TFLite runs int4 weights.

    Returns:
        Shape (batch, height, width, N).

    Raises:
        ValueError: if x is not int8.
    """
    if x.grid.dtype != "int8":
        raise ValueError(
            f"conv_2d of {x.grid.dtype} {x.qvalue.shape}: LiteRT reads the converter's "
            "int32 bias as int64 and returns other numbers; quantize the input to "
            "int8, or train for ONNX by edge.fake_quantize(..., kernels=None)"
        )
    convolution = Convolution.of(
        x.qvalue.shape,
        weights.qvalue.shape,
        strides,
        padding,
        rhs_dilation=dilation,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )
    padded = convolution.pad(x.qvalue, x.grid.zero_point)
    sums = _sums(lowering.Conv(convolution.of_padded()), padded, weights.qvalue)
    offsets = x.grid.zero_point * jnp.sum(weights.qvalue, (0, 1, 2), jnp.int32)
    rounding = _conv_rounding(x, weights, groups, kernels)
    return _requantized(sums - offsets, bias, x, weights, grid, clamp, rounding)


def _requantized(
    sums: jax.Array,
    bias: Quantized | None,
    x: Quantized,
    weights: Quantized,
    grid: Grid,
    clamp: Clamp,
    rounding: fixed_point.Rounding | None,
) -> jax.Array:
    """Requantizes sums of products to the grid of the result.

    XNNPACK: ``rint(float32(sums + bias) * m) + zero_point``, with
    ``m = x_scale * weights_scale / scale`` in float32 (its qs8 kernels on x86, fp32
    requantization). TFLite: m in float64 becomes a `fixed_point.quantized_multiplier`
    for `fixed_point.multiply`.

    Args:
        sums: int32, channels last.
        bias: int32, one for each channel.
        x: activations.
        weights: weights, with scales that are concrete or traced.
        grid: grid of the result.
        clamp: range of a fused activation.
        rounding: rounding in fixed point; None for XNNPACK's float32.
    """
    if bias is not None:
        sums += bias.qvalue
    given = x.grid.scale, weights.grid.scale, grid.scale
    if rounding is None:
        factor = scales.factor(*given)
        return rescaling.requantize(sums, factor, grid, clamp)
    fixed = scales.fixed_factor(*given)
    products = fixed_point.multiply(sums, *fixed, rounding)
    return rescaling.shifted(products, grid, clamp)


def _conv_rounding(x, weights, groups, kernels):
    if kernels == "reference":
        return "away"
    if kernels == "xnnpack" and weights.grid.dtype == "int8":
        return None
    if groups == x.qvalue.shape[-1]:  # Depthwise, even with a single channel.
        return "eights"
    return "upward" if groups == 1 else "away"


def _batch_matmul_of_int16(x, y, grid):
    if x.qvalue.shape[-1] > 256:
        raise ValueError(
            f"batch_matmul of int16 {x.qvalue.shape} and {y.qvalue.shape}: sums of "
            "more than 256 products are not simulated; contract a smaller axis, or "
            "int8, or train by edge.fake_quantize(..., kernels=None)"
        )
    real = np.float64(np.float32(x.grid.scale)) * np.float64(np.float32(y.grid.scale))
    fixed = fixed_point.quantized_multiplier(real / np.float64(np.float32(grid.scale)))
    wide = x.qvalue.astype(jnp.int32)
    parts = (Quantized(part, x.grid) for part in (wide >> 8, wide & 255))
    sums = [_batched_dot(part, y) for part in parts]
    products = fixed_point.rounded_short(sums[0], sums[1], *fixed)
    return rescaling.shifted(products, grid)


def _batched_dot(x: Quantized, y: Quantized) -> jax.Array:
    rank = x.qvalue.ndim
    batch = tuple(range(rank - 2))
    return _dot(x, y, (((rank - 1,), (rank - 2,)), (batch, batch)))


def _dot(
    quantized_x: Quantized, quantized_y: Quantized, dims: dn.DimensionNumbers
) -> jax.Array:
    """Contracts ``x - x's zero point`` with ``y - y's zero point``."""
    ((contracted,), (of_y,)), (batch, _) = dims
    x, y = quantized_x.qvalue, quantized_y.qvalue
    x_zero, y_zero = quantized_x.grid.zero_point, quantized_y.grid.zero_point
    if y.dtype == jnp.int16 or x.dtype == jnp.int16:
        wide = x.astype(jnp.int32), y.astype(jnp.int32)
        return lax.dot_general(*wide, dims, preferred_element_type=jnp.int32)
    sums = _sums(lowering.Dot(dims, x.ndim, y.ndim), x, y)
    if x_zero:
        of_columns = jnp.sum(y, of_y, jnp.int32)
        sums -= x_zero * jnp.expand_dims(of_columns, len(batch))
    if y_zero:
        of_rows = jnp.sum(x, contracted, jnp.int32)[..., None]
        count = x.shape[contracted]
        sums -= y_zero * (of_rows - count * x_zero)
    return sums


def _sums(contraction: lowering.Contraction, x: jax.Array, y: jax.Array) -> jax.Array:
    """Contracts integers; returns int32."""
    left, right = (lowering.DotInput(one, largest=_LARGEST) for one in (x, y))
    return lowering.Integers()(contraction, left, right).astype(jnp.int32)
