"""Transposed convolutions of floats, by weights that are known."""

from collections.abc import Sequence

import numpy as np

from aqtlite.edge.onnx.writer import Array, Writer
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


def write(
    writer: Writer, equation: Equation, inputs: Sequence[Array], name: str
) -> str:
    """Adds a ConvTranspose; returns its output.

    Args:
        writer: writer of the graph.
        equation: convolution that `is_transposed`.
        inputs: inputs of the equation.
        name: name of the output.
    """
    params, (x, weight) = equation.params, inputs
    assert weight.known is not None
    dims = params["dimension_numbers"]
    groups = params["feature_group_count"]
    x = writer.transpose(x, dims.lhs_spec, f"{name}/channels_first")
    # ConvTranspose adds what a window turned around would gather.
    w = np.flip(
        np.transpose(weight.known, dims.rhs_spec),
        tuple(range(2, len(dims.rhs_spec))),
    )
    outputs, channels, *window = w.shape
    w = w.reshape(groups, outputs // groups, channels, *window).swapaxes(1, 2)
    w = w.reshape(groups * channels, outputs // groups, *window)
    kernel = writer.initializer(w, "float32", f"{name}/weight")
    pads = _pads(equation, weight.shape)
    shape = (x.shape[0], outputs, *_sizes(equation, x.shape[2:], window))
    y = writer.apply(
        "ConvTranspose",
        [x],
        shape,
        None,
        f"{name}/transposed",
        kernel,
        dilations=list(map(int, params["rhs_dilation"])),
        group=int(groups),
        output_padding=[max(-high, 0) for _, high in pads],
        pads=[low for low, _ in pads] + [max(high, 0) for _, high in pads],
        strides=list(map(int, params["lhs_dilation"])),
    )
    order = np.argsort(dims.out_spec).tolist()
    return writer.transpose(y, order, name).name


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


def _sizes(
    equation: Equation, sizes: Sequence[int], window: Sequence[int]
) -> list[int]:
    params = equation.params
    return [
        (size - 1) * stride + 1 + low + high - (extent - 1) * step
        for size, extent, stride, step, (low, high) in zip(
            sizes,
            window,
            params["lhs_dilation"],
            params["rhs_dilation"],
            params["padding"],
            strict=True,
        )
    ]
