"""Transposed convolutions of floats, by weights that are known."""

from collections.abc import Sequence

import numpy as np

from aqtlite.edge.onnx.forms.base import Call
from aqtlite.edge.onnx.writer import Array
from aqtlite.edge.operators.equation import Equation


def is_transposed(equation: Equation, weight: Array) -> bool:
    """Whether an equation is what ONNX has as a ConvTranspose.

    Args:
        equation: equation of any primitive.
        weight: second input of the equation.
    """
    params = equation.params
    return (
        equation.primitive == "conv_general_dilated"
        and any(step != 1 for step in params["lhs_dilation"])
        and all(step == 1 for step in params["window_strides"])
        and params["batch_group_count"] == 1
        and weight.known is not None
        and _is_padding_of_onnx(equation, weight.shape)
    )


def write(call: Call, equation: Equation) -> Array:
    """Adds a ConvTranspose; returns its output.

    Args:
        call: call of the equation.
        equation: convolution that `is_transposed`.
    """
    params, (x, weight), writer = equation.params, call.inputs, call.writer
    assert weight.known is not None
    dims = params["dimension_numbers"]
    groups = params["feature_group_count"]
    x = writer.transpose(x, dims.lhs_spec, f"{call.name}/channels_first")
    # ConvTranspose adds what a window turned around would gather.
    w = np.flip(
        np.transpose(weight.known, dims.rhs_spec),
        tuple(range(2, len(dims.rhs_spec))),
    )
    outputs, channels, *window = w.shape
    w = w.reshape(groups, outputs // groups, channels, *window).swapaxes(1, 2)
    w = w.reshape(groups * channels, outputs // groups, *window)
    kernel = writer.initializer(w, "float32", f"{call.name}/weight")
    pads = _pads(equation, weight.shape)
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


def _pads(equation: Equation, of_weight: Sequence[int]) -> list[tuple[int, int]]:
    """What ConvTranspose removes of each end of its axes."""
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
    """Whether nothing is added to an axis but less than a stride at its end."""
    strides = equation.params["lhs_dilation"]
    pads = _pads(equation, of_weight)
    return all(
        low >= 0 and high > -stride
        for stride, (low, high) in zip(strides, pads, strict=True)
    )
