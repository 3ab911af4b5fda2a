"""Convolutions and transposed convolutions."""

import jax.numpy as jnp
from jax import lax

from aqtlite.onnx.evaluation import Call, Value
from aqtlite.onnx.operators.windows import Window, halves, pairs_of
from aqtlite.onnx.registry import operator


def _dimension_numbers(spatial: int) -> lax.ConvDimensionNumbers:
    axes = tuple(range(spatial + 2))
    return lax.ConvDimensionNumbers(axes, axes, axes)


def _with_bias(y: Value, bias: Value) -> Value:
    return y if bias is None else y + bias.reshape(-1, *[1] * (y.ndim - 2))


@operator("Conv", weights=(1, 2))
def conv(call: Call, x: Value, kernel: Value, bias: Value = None) -> Value:
    """Convolves channels first with a kernel (output, input / group, ...)."""
    window = Window.of(call, kernel.shape[2:])
    y = lax.conv_general_dilated(
        jnp.asarray(x),
        jnp.asarray(kernel),
        window.strides,
        window.pads(call, x.shape[2:]),
        rhs_dilation=window.dilations,
        dimension_numbers=_dimension_numbers(x.ndim - 2),
        feature_group_count=call.attribute("group", 1),
    )
    return _with_bias(y, bias)


@operator("ConvTranspose", weights=(1, 2))
def _conv_transpose(call: Call, x: Value, kernel: Value, bias: Value = None) -> Value:
    window = Window.of(call, kernel.shape[2:])
    added = call.attribute("output_padding") or [0] * len(window.sizes)
    pads = _cropped(call, window, x.shape[2:], added)
    padding = [
        (extent - 1 - low, extent - 1 - high + more)
        for extent, (low, high), more in zip(window.extents, pads, added, strict=True)
    ]
    groups = call.attribute("group", 1)
    # (input, output / group, ...) becomes (output, input / group, ...), mirrored.
    kernel = jnp.asarray(kernel)
    parts = kernel.reshape(groups, -1, *kernel.shape[1:]).swapaxes(1, 2)
    parts = parts.reshape(-1, *parts.shape[2:])
    y = lax.conv_general_dilated(
        jnp.asarray(x),
        lax.rev(parts, range(2, parts.ndim)),
        [1] * len(window.sizes),
        padding,
        lhs_dilation=window.strides,
        rhs_dilation=window.dilations,
        dimension_numbers=_dimension_numbers(x.ndim - 2),
        feature_group_count=groups,
    )
    return _with_bias(y, bias)


def _cropped(
    call: Call, window: Window, spatial: tuple[int, ...], added: list[int]
) -> list[tuple[int, int]]:
    """What the attributes say of the padding that a convolution back would have."""
    kind, shape = call.attribute("auto_pad", "NOTSET"), call.attribute("output_shape")
    if shape is None and kind in ("SAME_UPPER", "SAME_LOWER"):
        shape = [n * s for n, s in zip(spatial, window.strides, strict=True)]
    if shape is None:
        return pairs_of(call.attribute("pads") or [0] * 2 * len(window.sizes))
    pads = []
    for axis, size in enumerate(shape[-len(spatial) :]):
        full = window.strides[axis] * (spatial[axis] - 1) + window.extents[axis]
        total = full + added[axis] - size
        # Outputs that no window reaches are at the end, as a convolution leaves them.
        pads.append(halves(total, kind == "SAME_UPPER") if total > 0 else (0, total))
    return pads
