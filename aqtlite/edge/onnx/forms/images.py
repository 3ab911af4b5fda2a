"""Convolutions and pooling."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from aqtlite.edge.onnx.forms.base import Form, Output, number
from aqtlite.edge.onnx.writer import Array, Writer
from aqtlite.edge.operators import contractions, reductions
from aqtlite.edge.operators.base import Operator

_TO_CHANNELS_FIRST = (0, 3, 1, 2)
_TO_CHANNELS_LAST = (0, 2, 3, 1)


def _image_operator(
    writer: Writer,
    operator: str,
    inputs: Sequence[Array],
    output: Output,
    **attributes: Any,
) -> Array:
    """An operator of [N, C, H, W]; onnxruntime removes pairs of transpositions."""
    x, *rest = inputs
    x = writer.transpose(x, _TO_CHANNELS_FIRST, f"{output.name}/channels_first")
    shape = [output.shape[i] for i in _TO_CHANNELS_FIRST]
    y = writer.apply(
        operator, [x, *rest], shape, output.grid, output.name, **attributes
    )
    return writer.transpose(y, _TO_CHANNELS_LAST, f"{output.name}/channels_last")


def _conv(
    writer: Writer,
    operator: contractions.Conv2D,
    inputs: Sequence[Array],
    output: Output,
) -> Array:
    x, w, *bias = inputs
    if output.grid is None and writer.has_integers:
        # Behind integers, onnxruntime makes integers of the float kernel of a Conv,
        # unless an operator that is in none of its patterns is between.
        lowest = number(writer, float(np.finfo(np.float32).min), np.float32)
        x = writer.apply("Max", [x], x.shape, None, f"{output.name}/input", lowest)
    kernel = _first_axes_last(writer, w, output.name)
    window = kernel.shape[2:]
    extents = [(k - 1) * d + 1 for k, d in zip(window, operator.dilation, strict=True)]
    return _image_operator(
        writer,
        "Conv",
        [x, kernel, *bias],
        output,
        kernel_shape=list(window),
        strides=list(operator.strides),
        dilations=list(operator.dilation),
        group=operator.groups,
        pads=_pads(x.shape[1:3], extents, operator.strides, operator.padding),
    )


def _first_axes_last(writer: Writer, w: Array, name: str) -> Array:
    """A kernel of [H, W, C, N] as [N, C, H, W], where it is not that already."""
    return w if w.grid is not None else writer.transpose(w, (3, 2, 0, 1), f"{name}/w")


def _pads(
    sizes: Sequence[int], window: Sequence[int], strides: Sequence[int], padding: str
) -> list[int]:
    pairs = lax.padtype_to_pads(sizes, window, strides, padding)
    return [int(low) for low, _ in pairs] + [int(high) for _, high in pairs]


def _average_pool(
    writer: Writer,
    operator: reductions.AveragePool2D,
    inputs: Sequence[Array],
    output: Output,
) -> Array:
    return _image_operator(
        writer,
        "AveragePool",
        inputs,
        output,
        kernel_shape=list(operator.window),
        strides=list(operator.strides),
    )


def _max_pool(
    writer: Writer,
    operator: reductions.MaxPool2D,
    inputs: Sequence[Array],
    output: Output,
) -> Array:
    sizes = inputs[0].shape[1:3]
    return _image_operator(
        writer,
        "MaxPool",
        inputs,
        output,
        kernel_shape=list(operator.window),
        strides=list(operator.strides),
        pads=_pads(sizes, operator.window, operator.strides, operator.padding),
    )


FORMS: dict[type[Operator], Form] = {
    contractions.Conv2D: _conv,
    contractions.DepthwiseConv2D: _conv,
    reductions.AveragePool2D: _average_pool,
    reductions.MaxPool2D: _max_pool,
}
