"""Reductions and pooling."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
from jax import lax

from aqtlite.edge.operators.arithmetic import Multiply
from aqtlite.edge.operators.base import Operator
from aqtlite.edge.operators.layout import Pad
from aqtlite.edge.operators.reductions import (
    AveragePool2D,
    MaxPool2D,
    ReduceMax,
    ReduceMin,
    Sum,
)
from aqtlite.edge.translation.base import NotTranslatable, Site, Translation


def _reduction(operator: Callable[[tuple[int, ...]], Operator]) -> Translation:
    """A reduction over the axes of the equation."""
    return lambda site: [site.add(operator(tuple(site.params["axes"])), *site.inputs)]


def _reduce_window_sum(site: Site) -> Sequence[int]:
    image = _image(site)
    x = image.x
    if any(pair != (0, 0) for pair in image.padding):
        # Runtimes leave what they pad out of the mean, and JAX counts it.
        x = site.add(Pad(((0, 0), *image.padding, (0, 0))), x)
    mean = site.add(AveragePool2D(image.window, image.strides), x)
    count = site.builder.constant(np.float32(math.prod(image.window)))
    return [image.restored(site, site.add(Multiply(), mean, count))]


def _reduce_window_max(site: Site) -> Sequence[int]:
    image = _image(site)
    name = "VALID"
    if any(pair != (0, 0) for pair in image.padding):
        name = "SAME"
        sizes = site.shape(image.x)[1:3]
        same = lax.padtype_to_pads(sizes, image.window, image.strides, "SAME")
        if [tuple(pair) for pair in same] != image.padding:
            raise NotTranslatable(
                f"a max pooling has padding {image.padding}; runtimes pad by SAME or "
                "VALID"
            )
    y = site.add(MaxPool2D(image.window, image.strides, name), image.x)
    return [image.restored(site, y)]


_Pair = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class _Image:
    """The pooled array as [N, H, W, C], and the window over H and W."""

    x: int
    window: _Pair
    strides: _Pair
    padding: list[_Pair]
    order: tuple[int, ...]
    """The axes of the array, as the image has them, but for an H of size 1."""

    def restored(self, site: Site, y: int) -> int:
        """The result, with its axes where the array has them."""
        shape = site.shape(site.node.output)
        y = site.reshape(y, [shape[axis] for axis in self.order])
        return site.transpose(y, np.argsort(self.order).tolist())


def _image(site: Site) -> _Image:
    params, (x,) = site.params, site.inputs
    if any(d != 1 for key in ("base_dilation", "window_dilation") for d in params[key]):
        raise NotTranslatable("a pooling is dilated")
    geometry = list(
        zip(
            *(params[k] for k in ("window_dimensions", "window_strides", "padding")),
            strict=True,
        )
    )
    rank = len(geometry)
    pooled = [i for i, one in enumerate(geometry) if one != (1, 1, (0, 0))]
    around = [i for i in range(rank) if i not in pooled]
    while len(around) > 2:
        # A window of size 1, along the images: the axis before the channels.
        pooled = sorted([*pooled, around.pop(-2)])
    if rank not in (3, 4) or len(around) != 2:
        raise NotTranslatable(
            f"a pooling of windows {tuple(params['window_dimensions'])} is over more "
            "than two axes, or of other arrays than images"
        )
    batch, channel = around
    order = (batch, *pooled, channel)
    x = site.transpose(x, order)
    windows, strides, padding = (
        list(one) for one in zip(*(geometry[i] for i in pooled), strict=True)
    )
    if rank == 3:
        n, *rest = site.shape(x)
        x = site.reshape(x, [n, 1, *rest])
        windows, strides, padding = [1, *windows], [1, *strides], [(0, 0), *padding]
    pairs = [(int(low), int(high)) for low, high in padding]
    return _Image(x, (windows[0], windows[1]), (strides[0], strides[1]), pairs, order)


TRANSLATIONS: dict[str, Translation] = {
    "reduce_sum": _reduction(Sum),
    "reduce_max": _reduction(ReduceMax),
    "reduce_min": _reduction(ReduceMin),
    "reduce_window_sum": _reduce_window_sum,
    "reduce_window_max": _reduce_window_max,
}
