"""The ONNX forms of convolutions and pooling."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from aqtlite.edge.grid import Grid, Quantized
from aqtlite.edge.onnx import weights
from aqtlite.edge.onnx.call import Call, Form
from aqtlite.edge.onnx.writer import Array
from aqtlite.edge.operators import contractions, reductions
from aqtlite.edge.operators.base import Equation, is_transposed_convolution

_TO_CHANNELS_FIRST = (0, 3, 1, 2)
_TO_CHANNELS_LAST = (0, 2, 3, 1)


def _image_operator(
    call: Call, operator: str, inputs: Sequence[Array], **attributes: Any
) -> Array:
    """Adds an operator on [N, C, H, W]; onnxruntime removes pairs of transpositions."""
    (x, *rest), writer, name = inputs, call.writer, call.name
    x = writer.transpose(x, _TO_CHANNELS_FIRST, f"{name}/channels_first")
    shape = [call.shape[i] for i in _TO_CHANNELS_FIRST]
    y = writer.apply(operator, [x, *rest], shape, call.grid, name, **attributes)
    return writer.transpose(y, _TO_CHANNELS_LAST, f"{name}/channels_last")


def conv(call: Call, operator: contractions.Conv2D) -> Array:
    """Adds a convolution; returns its output."""
    if call.weight is not None:
        return _conv_of_frozen(call, operator, call.weight)
    (x, w, *bias), writer, name = call.inputs, call.writer, call.name
    if call.grid is None:
        x = _unfused(call, x)
    # A quantized kernel is already stored as [N, C, H, W].
    if w.grid is None:
        w = writer.transpose(w, (3, 2, 0, 1), f"{name}/w")
    geometry = _geometry(operator, x.shape[1:3], w.shape[2:])
    return _image_operator(call, "Conv", [x, w, *bias], **geometry)


def _unfused(call: Call, x: Array) -> Array:
    """The input of a convolution in float, whose kernel has to stay in float.

    After integers, onnxruntime would quantize it, with one scale for all channels.
    """
    writer = call.writer
    return writer.barrier(x, f"{call.name}/input") if writer.has_integers else x


def _conv_of_frozen(
    call: Call, operator: contractions.Conv2D, weight: Quantized
) -> Array:
    (x, *bias), name = call.inputs, call.name
    geometry = _geometry(operator, x.shape[1:3], weight.qvalue.shape[2:])
    if not (call.is_dynamic and weights.has_integer_conv(weight, operator.groups)):
        w = weights.floats(call, weight)
        return _image_operator(call, "Conv", [x, w, *bias], **geometry)
    x = call.writer.transpose(x, _TO_CHANNELS_FIRST, f"{name}/channels_first")
    shape = [call.shape[i] for i in _TO_CHANNELS_FIRST]
    y = weights.integer_conv(call, x, weight, shape, geometry)
    for one in bias:
        one = call.writer.reshape(one, (one.size, 1, 1), f"{name}/bias")
        y = call.writer.apply("Add", [y, one], y.shape, None, f"{name}/sum")
    return call.writer.transpose(y, _TO_CHANNELS_LAST, f"{name}/channels_last")


def _geometry(
    operator: contractions.Conv2D, sizes: Sequence[int], window: Sequence[int]
) -> dict[str, Any]:
    """Attributes of an ONNX convolution."""
    extents = [(k - 1) * d + 1 for k, d in zip(window, operator.dilation, strict=True)]
    return {
        "kernel_shape": list(window),
        "strides": list(operator.strides),
        "dilations": list(operator.dilation),
        "group": operator.groups,
        "pads": _pads(sizes, extents, operator.strides, operator.padding),
    }


def _pads(
    sizes: Sequence[int], window: Sequence[int], strides: Sequence[int], padding: str
) -> list[int]:
    pairs = lax.padtype_to_pads(sizes, window, strides, padding)
    return [int(low) for low, _ in pairs] + [int(high) for _, high in pairs]


def pool(name: str) -> Form:
    """The form of a pooling, by an ONNX operator."""

    def form(call: Call, operator: Any) -> Array:
        window, strides = list(operator.window), list(operator.strides)
        more = {"kernel_shape": window, "strides": strides}
        if isinstance(operator, reductions.MaxPool2D):
            sizes = call.inputs[0].shape[1:3]
            more["pads"] = _pads(sizes, window, strides, operator.padding)
        return _image_operator(call, name, call.inputs, **more)

    return form


def is_transposed(equation: Equation, weight: Array) -> bool:
    """Whether an equation can be written as an ONNX ConvTranspose.

    Args:
        equation: equation of any primitive.
        weight: second input of the equation.
    """
    params = equation.params
    return (
        is_transposed_convolution(equation)
        and all(step == 1 for step in params["window_strides"])
        and params["batch_group_count"] == 1
        and weight.known is not None
        and _is_padding_of_onnx(equation, weight.shape)
    )


def conv_transpose(call: Call, equation: Equation) -> Array:
    """Adds a ConvTranspose; returns its output.

    Args:
        call: call of the equation.
        equation: convolution that `is_transposed`.
    """
    params, (x, weight), writer = equation.params, call.inputs, call.writer
    assert weight.known is not None
    dims = params["dimension_numbers"]
    groups = params["feature_group_count"]
    x = _unfused(call, x)
    x = writer.transpose(x, dims.lhs_spec, f"{call.name}/channels_first")
    if call.weight is not None and takes_frozen(equation, call.weight):
        kernel = weights.floats(
            call, Quantized(*transposed_layout(equation, call.weight))
        ).name
    else:
        w = _scattered(equation, weight.known)
        kernel = writer.initializer(w, "float32", f"{call.name}/weight")
    pads = _removed(equation, weight.shape)
    y = writer.apply(
        "ConvTranspose",
        [x],
        [call.shape[axis] for axis in dims.out_spec],
        None,
        f"{call.name}/transposed",
        kernel,
        dilations=list(map(int, params["rhs_dilation"])),
        group=int(groups),
        output_padding=[max(-high, 0) for _, high in pads],
        pads=[low for low, _ in pads] + [max(high, 0) for _, high in pads],
        strides=list(map(int, params["lhs_dilation"])),
    )
    return writer.transpose(y, np.argsort(dims.out_spec).tolist(), call.name)


def _scattered(equation: Equation, w: np.ndarray) -> np.ndarray:
    """A weight in the order of ConvTranspose, [I, O / groups, ...].

    It scatters, which equals gathering with the flipped window.
    """
    order = equation.params["dimension_numbers"].rhs_spec
    groups = equation.params["feature_group_count"]
    w = np.flip(np.transpose(w, order), tuple(range(2, len(order))))
    outputs, channels, *window = w.shape
    w = w.reshape(groups, outputs // groups, channels, *window).swapaxes(1, 2)
    return w.reshape(groups * channels, outputs // groups, *window)


def takes_frozen(equation: Equation, weight: Quantized) -> bool:
    """Whether the integers of a transposed convolution's weight can be written.

    With groups, the scales of channels do not vary along one axis of a ConvTranspose.
    """
    return equation.params["feature_group_count"] == 1 or weight.grid.axis is None


def transposed_layout(equation: Equation, weight: Quantized) -> tuple[np.ndarray, Grid]:
    """Integers and grid of a frozen weight, as a ConvTranspose has them."""
    grid, order = weight.grid, equation.params["dimension_numbers"].rhs_spec
    qvalue = _scattered(equation, np.asarray(weight.qvalue))
    if grid.axis is None:
        return qvalue, grid
    out, features, *window = order
    axis = [features, out, *window].index(grid.axis)
    if grid.block is None:
        return qvalue, dataclasses.replace(grid, axis=axis)
    scale, zero_point = (
        _scattered(equation, x) if np.ndim(x) else x
        for x in (grid.scale, grid.zero_point)
    )
    return qvalue, Grid(scale, zero_point, grid.dtype, axis, grid.block)


def _removed(equation: Equation, of_weight: Sequence[int]) -> list[tuple[int, int]]:
    """Number of elements that ConvTranspose removes at both ends of each axis."""
    params = equation.params
    window = [of_weight[i] for i in params["dimension_numbers"].rhs_spec[2:]]
    found = []
    for size, step, (low, high) in zip(
        window, params["rhs_dilation"], params["padding"], strict=True
    ):
        reach = (size - 1) * step
        found.append((int(reach - low), int(reach - high)))
    return found


def _is_padding_of_onnx(equation: Equation, of_weight: Sequence[int]) -> bool:
    """Whether axes are extended only at the end, and by less than a stride."""
    strides = equation.params["lhs_dilation"]
    pads = _removed(equation, of_weight)
    return all(
        low >= 0 and high > -stride
        for stride, (low, high) in zip(strides, pads, strict=True)
    )
