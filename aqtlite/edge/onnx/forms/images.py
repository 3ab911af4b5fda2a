"""Convolutions and pooling."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from aqtlite.edge.onnx.forms.base import Call, Form, number
from aqtlite.edge.onnx.writer import Array
from aqtlite.edge.operators import contractions, reductions
from aqtlite.edge.operators.base import Operator

_TO_CHANNELS_FIRST = (0, 3, 1, 2)
_TO_CHANNELS_LAST = (0, 2, 3, 1)


def _image_operator(
    call: Call, operator: str, inputs: Sequence[Array], **attributes: Any
) -> Array:
    """An operator of [N, C, H, W]; onnxruntime removes pairs of transpositions."""
    (x, *rest), writer, name = inputs, call.writer, call.name
    x = writer.transpose(x, _TO_CHANNELS_FIRST, f"{name}/channels_first")
    shape = [call.shape[i] for i in _TO_CHANNELS_FIRST]
    y = writer.apply(operator, [x, *rest], shape, call.grid, name, **attributes)
    return writer.transpose(y, _TO_CHANNELS_LAST, f"{name}/channels_last")


def _conv(call: Call, operator: contractions.Conv2D) -> Array:
    (x, w, *bias), writer, name = call.inputs, call.writer, call.name
    if call.grid is None and writer.has_integers:
        # Behind integers, onnxruntime makes integers of the float kernel of a Conv,
        # unless an operator that is in none of its patterns is between.
        lowest = number(writer, float(np.finfo(np.float32).min), np.float32)
        x = writer.apply("Max", [x], x.shape, None, f"{name}/input", lowest)
    # A quantized kernel is stored as [N, C, H, W] already.
    if w.grid is None:
        w = writer.transpose(w, (3, 2, 0, 1), f"{name}/w")
    window = w.shape[2:]
    extents = [(k - 1) * d + 1 for k, d in zip(window, operator.dilation, strict=True)]
    return _image_operator(
        call,
        "Conv",
        [x, w, *bias],
        kernel_shape=list(window),
        strides=list(operator.strides),
        dilations=list(operator.dilation),
        group=operator.groups,
        pads=_pads(x.shape[1:3], extents, operator.strides, operator.padding),
    )


def _pads(
    sizes: Sequence[int], window: Sequence[int], strides: Sequence[int], padding: str
) -> list[int]:
    pairs = lax.padtype_to_pads(sizes, window, strides, padding)
    return [int(low) for low, _ in pairs] + [int(high) for _, high in pairs]


def _average_pool(call: Call, operator: reductions.AveragePool2D) -> Array:
    window, strides = list(operator.window), list(operator.strides)
    return _image_operator(
        call, "AveragePool", call.inputs, kernel_shape=window, strides=strides
    )


def _max_pool(call: Call, operator: reductions.MaxPool2D) -> Array:
    sizes = call.inputs[0].shape[1:3]
    return _image_operator(
        call,
        "MaxPool",
        call.inputs,
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
