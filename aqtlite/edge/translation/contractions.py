"""Contractions, reductions and pooling."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.edge.operators.arithmetic import Multiply, ToFloat
from aqtlite.edge.operators.base import Operator
from aqtlite.edge.operators.contractions import (
    BatchMatMul,
    Conv2D,
    DepthwiseConv2D,
    FullyConnected,
)
from aqtlite.edge.operators.layout import Pad
from aqtlite.edge.operators.reductions import (
    AveragePool2D,
    MaxPool2D,
    ReduceMax,
    ReduceMin,
    Sum,
)
from aqtlite.edge.translation.base import Context, NotTranslatable, Translation


def dot_general(ctx: Context) -> Sequence[int]:
    """Fully connected if one operand is static (a weight), else a batch matmul."""
    (contracting, batch) = ctx.params["dimension_numbers"]
    lhs, rhs = (_floats(ctx, index) for index in range(2))
    if ctx.is_static(0) and not batch[0]:
        made = _fully_connected(ctx, rhs, contracting[1], lhs, contracting[0])
        # The remaining axes of the lhs, here the weight, come first in the result.
        of_weight = len(ctx.shape(lhs)) - len(contracting[0])
        rank = len(ctx.shape(made))
        order = [*range(rank - of_weight, rank), *range(rank - of_weight)]
        return [ctx.transpose(made, order)]
    if ctx.is_static(1) and not batch[0]:
        return [_fully_connected(ctx, lhs, contracting[0], rhs, contracting[1])]
    return [_batch_matmul(ctx, lhs, rhs)]


def _floats(ctx: Context, index: int) -> int:
    """An operand as floats; static integers are converted."""
    value = ctx.inputs[index]
    dtype = ctx.builder.values[value].dtype
    if jnp.issubdtype(dtype, jnp.floating):
        return value
    if not ctx.is_static(index):
        raise NotTranslatable(
            f"an operand is {dtype.name} and computed from the input: give the model "
            "floats, which are integers of the file in any case"
        )
    return ctx.add(ToFloat(), value)


def _fully_connected(
    ctx: Context, x: int, of_x: Sequence[int], w: int, of_w: Sequence[int]
) -> int:
    """A contraction of x with a weight; the remaining axes of x come first."""
    x_free = [i for i in range(len(ctx.shape(x))) if i not in of_x]
    w_free = [i for i in range(len(ctx.shape(w))) if i not in of_w]
    lead = [ctx.shape(x)[i] for i in x_free]
    columns = [ctx.shape(w)[i] for i in w_free]
    size = math.prod(ctx.shape(x)[i] for i in of_x)
    x = ctx.reshape(ctx.transpose(x, [*x_free, *of_x]), [*(lead or [1]), size])
    w = ctx.transpose(w, [*of_w, *w_free])
    w = ctx.reshape(w, [size, math.prod(columns)])
    return ctx.reshape(ctx.add(FullyConnected(), x, w), [*lead, *columns])


def _batch_matmul(ctx: Context, lhs: int, rhs: int) -> int:
    (of_lhs, of_rhs), (lhs_batch, rhs_batch) = ctx.params["dimension_numbers"]
    lhs_free, rhs_free = (
        [i for i in range(len(ctx.shape(x))) if i not in (*used, *batch)]
        for x, used, batch in ((lhs, of_lhs, lhs_batch), (rhs, of_rhs, rhs_batch))
    )
    batch = [ctx.shape(lhs)[i] for i in lhs_batch]
    rows = [ctx.shape(lhs)[i] for i in lhs_free]
    columns = [ctx.shape(rhs)[i] for i in rhs_free]
    size = math.prod(ctx.shape(lhs)[i] for i in of_lhs)
    lhs = ctx.transpose(lhs, [*lhs_batch, *lhs_free, *of_lhs])
    lhs = ctx.reshape(lhs, [*batch, math.prod(rows), size])
    rhs = ctx.transpose(rhs, [*rhs_batch, *of_rhs, *rhs_free])
    rhs = ctx.reshape(rhs, [*batch, size, math.prod(columns)])
    return ctx.reshape(ctx.add(BatchMatMul(), lhs, rhs), [*batch, *rows, *columns])


def conv_general_dilated(ctx: Context) -> Sequence[int]:
    """A convolution over one or two spatial axes."""
    params = ctx.params
    x, w = ctx.inputs
    if not ctx.is_static(1):
        raise NotTranslatable("its kernel is computed from the input")
    if params["batch_group_count"] != 1:
        raise NotTranslatable("it has batch_group_count, as gradients have")
    if any(d != 1 for d in params["lhs_dilation"]):
        raise NotTranslatable("it is a transposed convolution (lhs_dilation)")
    dims = params["dimension_numbers"]
    spatial = len(dims.lhs_spec) - 2
    if spatial not in (1, 2):
        raise NotTranslatable(
            f"it has {spatial} spatial axes, and runtimes have 1 or 2"
        )
    batch, feature, *x_axes = dims.lhs_spec
    out_feature, in_feature, *w_axes = dims.rhs_spec
    x = ctx.transpose(x, [batch, *x_axes, feature])
    w = ctx.transpose(w, [*w_axes, in_feature, out_feature])
    strides, dilation = params["window_strides"], params["rhs_dilation"]
    padding = params["padding"]
    if spatial == 1:
        n, *rest = ctx.shape(x)
        x, w = ctx.reshape(x, [n, 1, *rest]), ctx.reshape(w, [1, *ctx.shape(w)])
        strides, dilation = (1, *strides), (1, *dilation)
        padding = ((0, 0), *padding)
    x, name = _padded(ctx, x, ctx.shape(w)[:2], strides, dilation, padding)
    groups = params["feature_group_count"]
    is_depthwise = groups > 1 and ctx.shape(w)[2] == 1
    kind = DepthwiseConv2D if is_depthwise else Conv2D
    y = ctx.add(kind(tuple(strides), name, tuple(dilation), groups), x, w)
    if spatial == 1:
        n, _, *rest = ctx.shape(y)
        y = ctx.reshape(y, [n, *rest])
    order = [0] * (spatial + 2)
    out_batch, out_channel, *out_axes = dims.out_spec
    order[out_batch], order[out_channel] = 0, spatial + 1
    for index, axis in enumerate(out_axes):
        order[axis] = 1 + index
    return [ctx.transpose(y, order)]


def _padded(
    ctx: Context,
    x: int,
    window: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[tuple[int, int]],
) -> tuple[int, str]:
    """Pads the input if the operator cannot; returns it and the operator's padding."""
    padding = [(int(low), int(high)) for low, high in padding]
    if all(pair == (0, 0) for pair in padding):
        return x, "VALID"
    sizes = ctx.shape(x)[1:3]
    extents = [(k - 1) * d + 1 for k, d in zip(window, dilation, strict=True)]
    if [tuple(p) for p in lax.padtype_to_pads(sizes, extents, strides, "SAME")] == (
        padding
    ):
        return x, "SAME"
    if any(side < 0 for pair in padding for side in pair):
        raise NotTranslatable(f"it has negative padding {padding}")
    return ctx.add(Pad(((0, 0), *padding, (0, 0))), x), "VALID"


def _reduction(operator: Callable[[tuple[int, ...]], Operator]) -> Translation:
    """The translation of a reduction, to an operator over the equation's axes."""
    return lambda ctx: [ctx.add(operator(tuple(ctx.params["axes"])), *ctx.inputs)]


def _reduce_window_sum(ctx: Context) -> Sequence[int]:
    image = _image(ctx)
    x = image.x
    if any(pair != (0, 0) for pair in image.padding):
        # JAX counts padding in the mean; a runtime's own padding would be left out.
        x = ctx.add(Pad(((0, 0), *image.padding, (0, 0))), x)
    mean = ctx.add(AveragePool2D(image.window, image.strides), x)
    count = ctx.builder.constant(np.float32(math.prod(image.window)))
    return [image.restored(ctx, ctx.add(Multiply(), mean, count))]


def _reduce_window_max(ctx: Context) -> Sequence[int]:
    image = _image(ctx)
    name = "VALID"
    if any(pair != (0, 0) for pair in image.padding):
        name = "SAME"
        sizes = ctx.shape(image.x)[1:3]
        same = lax.padtype_to_pads(sizes, image.window, image.strides, "SAME")
        if [tuple(pair) for pair in same] != image.padding:
            raise NotTranslatable(
                f"a max pooling has padding {image.padding}; runtimes pad by SAME or "
                "VALID"
            )
    y = ctx.add(MaxPool2D(image.window, image.strides, name), image.x)
    return [image.restored(ctx, y)]


_Pair = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class _Image:
    """The pooled array as [N, H, W, C], and the window over H and W."""

    x: int
    window: _Pair
    strides: _Pair
    padding: list[_Pair]
    order: tuple[int, ...]
    """Axes of the array in the order of the image, without an H that was added."""

    def restored(self, ctx: Context, y: int) -> int:
        """Adds the transposition of the result back to the array's order of axes."""
        shape = ctx.shape(ctx.node.output)
        y = ctx.reshape(y, [shape[axis] for axis in self.order])
        return ctx.transpose(y, np.argsort(self.order).tolist())


def _image(ctx: Context) -> _Image:
    params, (x,) = ctx.params, ctx.inputs
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
        # Also pool, with a window of size 1, over the last axis before the channels.
        pooled = sorted([*pooled, around.pop(-2)])
    if rank not in (3, 4) or len(around) != 2:
        raise NotTranslatable(
            f"a pooling of windows {tuple(params['window_dimensions'])} is over more "
            "than two axes, or of other arrays than images"
        )
    batch, channel = around
    order = (batch, *pooled, channel)
    x = ctx.transpose(x, order)
    windows, strides, padding = (
        list(one) for one in zip(*(geometry[i] for i in pooled), strict=True)
    )
    if rank == 3:
        n, *rest = ctx.shape(x)
        x = ctx.reshape(x, [n, 1, *rest])
        windows, strides, padding = [1, *windows], [1, *strides], [(0, 0), *padding]
    pairs = [(int(low), int(high)) for low, high in padding]
    return _Image(x, (windows[0], windows[1]), (strides[0], strides[1]), pairs, order)


TRANSLATIONS: dict[str, Translation] = {
    "dot_general": dot_general,
    "conv_general_dilated": conv_general_dilated,
    "reduce_sum": _reduction(Sum),
    "reduce_max": _reduction(ReduceMax),
    "reduce_min": _reduction(ReduceMin),
    "reduce_window_sum": _reduce_window_sum,
    "reduce_window_max": _reduce_window_max,
}
