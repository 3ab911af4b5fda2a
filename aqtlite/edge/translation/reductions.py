"""Reductions and pooling."""

import math
from collections.abc import Sequence

import numpy as np
from jax import lax

from aqtlite.edge.operators.arithmetic import Multiply
from aqtlite.edge.operators.layout import Pad
from aqtlite.edge.operators.reductions import (
    AveragePool2D,
    MaxPool2D,
    ReduceMax,
    ReduceMin,
    Sum,
)
from aqtlite.edge.translation.base import NotTranslatable, Site, Translation


def _reduce_sum(site: Site) -> Sequence[int]:
    return [site.add(Sum(tuple(site.params["axes"])), *site.inputs)]


def _reduce_max(site: Site) -> Sequence[int]:
    return [site.add(ReduceMax(tuple(site.params["axes"])), *site.inputs)]


def _reduce_min(site: Site) -> Sequence[int]:
    return [site.add(ReduceMin(tuple(site.params["axes"])), *site.inputs)]


def _reduce_window_sum(site: Site) -> Sequence[int]:
    x, window, strides, padding = _image(site)
    if any(pair != (0, 0) for pair in padding):
        # Runtimes leave what they pad out of the mean, and JAX counts it.
        x = site.add(Pad(((0, 0), *padding, (0, 0))), x)
    mean = site.add(AveragePool2D(window, strides), x)
    count = site.builder.constant(np.float32(math.prod(window)))
    y = site.add(Multiply(), mean, count)
    return [site.reshape(y, site.shape(site.node.output))]


def _reduce_window_max(site: Site) -> Sequence[int]:
    x, window, strides, padding = _image(site)
    name = "VALID"
    if any(pair != (0, 0) for pair in padding):
        name = "SAME"
        same = lax.padtype_to_pads(site.shape(x)[1:3], window, strides, "SAME")
        if [tuple(pair) for pair in same] != padding:
            raise NotTranslatable(
                f"a max pooling has padding {padding}; runtimes pad by SAME or VALID"
            )
    y = site.add(MaxPool2D(window, strides, name), x)
    return [site.reshape(y, site.shape(site.node.output))]


_Pair = tuple[int, int]


def _image(site: Site) -> tuple[int, _Pair, _Pair, list[_Pair]]:
    """The input as [N, H, W, C], and window, strides and padding of H and W."""
    params, (x,) = site.params, site.inputs
    if any(d != 1 for key in ("base_dilation", "window_dilation") for d in params[key]):
        raise NotTranslatable("a pooling is dilated")
    window, strides, padding = (
        list(params[key]) for key in ("window_dimensions", "window_strides", "padding")
    )
    if len(window) == 3:
        n, *rest = site.shape(x)
        x = site.reshape(x, [n, 1, *rest])
        window.insert(1, 1)
        strides.insert(1, 1)
        padding.insert(1, (0, 0))
    around = [(window[i], strides[i], tuple(padding[i])) for i in (0, -1)]
    if len(window) != 4 or around != [(1, 1, (0, 0))] * 2:
        raise NotTranslatable(
            f"a pooling of windows {tuple(window)} is none over the axes between the "
            "first and the last one of three or four"
        )
    pairs = [(int(low), int(high)) for low, high in padding[1:3]]
    return x, (window[1], window[2]), (strides[1], strides[2]), pairs


TRANSLATIONS: dict[str, Translation] = {
    "reduce_sum": _reduce_sum,
    "reduce_max": _reduce_max,
    "reduce_min": _reduce_min,
    "reduce_window_sum": _reduce_window_sum,
    "reduce_window_max": _reduce_window_max,
}
