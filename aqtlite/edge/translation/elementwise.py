"""Elementwise functions of one or two arrays."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aqtlite.edge.masks import MASKED_BELOW
from aqtlite.edge.operators.arithmetic import (
    Add,
    Clip,
    Divide,
    Maximum,
    Minimum,
    Multiply,
    Subtract,
)
from aqtlite.edge.operators.base import Equation
from aqtlite.edge.operators.layout import BroadcastTo, Reshape, Select
from aqtlite.edge.operators.reductions import AveragePool2D, Mean, Sum
from aqtlite.edge.operators.unary import LeakyRelu, Unary
from aqtlite.edge.translation.base import Context, NotTranslatable, Translation


def _add(ctx: Context) -> Sequence[int]:
    for x, index in zip(ctx.inputs, (1, 0), strict=True):
        known = ctx.constant(index)
        if known is not None and (known <= MASKED_BELOW).any():
            return [_masked(ctx, x, known)]
    return [ctx.add(Add(), *ctx.inputs)]


def _masked(ctx: Context, x: int, known: np.ndarray) -> int:
    """An additive mask, as a selection: its values are far below any integer grid."""
    kept = known > MASKED_BELOW
    if known[kept].any():
        rest = ctx.builder.constant(np.where(kept, known, np.float32(0)))
        x = ctx.add(Add(), x, rest)
    shape = ctx.shape(ctx.node.output)
    if ctx.shape(x) != shape:
        x = ctx.add(BroadcastTo(shape), x)
    mask = np.broadcast_to(kept, shape)
    below = np.full(shape, np.float32(known.min()))
    return ctx.add(Select(), ctx.builder.constant(mask), x, ctx.builder.constant(below))


def _mul(ctx: Context) -> Sequence[int]:
    x, y = ctx.inputs
    for one, index in ((x, 1), (y, 0)):
        factor = ctx.uniform(index)
        if factor and (mean := _mean_of_sum(ctx, one, 1 / factor)):
            return [mean]
    return [ctx.add(Multiply(), x, y)]


def _div(ctx: Context) -> Sequence[int]:
    x, y = ctx.inputs
    divisor = ctx.uniform(1)
    if divisor is not None and (mean := _mean_of_sum(ctx, x, divisor)):
        return [mean]
    if ctx.is_static(1):
        one = ctx.builder.constant(np.float32(1))
        return [ctx.add(Multiply(), x, ctx.add(Divide(), one, y))]
    root = _source(ctx, y, Unary("sqrt"))
    if root is None:
        raise NotTranslatable(
            "LiteRT's quotients of integers are wrong where the numerator is small: "
            "divide by a known number or by a square root, or multiply by what you know"
        )
    return [ctx.add(Multiply(), x, _inverse_of_root(ctx, root))]


def _inverse_of_root(ctx: Context, root: list[Any]) -> int:
    """The inverse of a square root that `_source` found."""
    (squared, *layouts) = root
    inverse = ctx.add(Unary("rsqrt"), squared)
    for layout in layouts:
        inverse = ctx.add(layout, inverse)
    return inverse


def _convert(ctx: Context) -> Sequence[int]:
    """Floats of booleans, as a selection of one or zero."""
    (x,) = ctx.inputs
    if ctx.builder.values[x].dtype != np.bool_:
        raise NotTranslatable(
            "it makes floats of integers that are computed; give the model floats, "
            "which are integers of the file in any case"
        )
    one, zero = (ctx.builder.constant(np.float32(number)) for number in (1, 0))
    return [ctx.add(Select(), x, one, zero)]


def _source(ctx: Context, y: int, operator: Unary) -> list[Any] | None:
    """The input of `operator`, and layouts from its output to y; None if y differs."""
    node = ctx.producer(y)
    if node is None:
        return None
    if isinstance(node.operator, Reshape | BroadcastTo):
        found = _source(ctx, node.inputs[0], operator)
        return None if found is None else [*found, node.operator]
    return [node.inputs[0]] if node.operator == operator else None


def _mean_of_sum(ctx: Context, x: int, divisor: float) -> int | None:
    """The mean, if x is a sum of `divisor` elements; otherwise None."""
    node = ctx.producer(x)
    if node is None:
        return None
    if isinstance(node.operator, Reshape):
        mean = _mean_of_sum(ctx, node.inputs[0], divisor)
        return None if mean is None else ctx.add(node.operator, mean)
    if isinstance(node.operator, Sum):
        (source,), axes = node.inputs, node.operator.axes
        count = math.prod(ctx.shape(source)[i] for i in axes)
        return ctx.add(Mean(axes), source) if math.isclose(count, divisor) else None
    if isinstance(node.operator, Multiply):
        # A sum pooling is translated to a mean pooling times the size of the window.
        mean, factor = node.inputs
        pool, size = ctx.producer(mean), ctx.builder.constants.get(factor)
        is_pool = pool is not None and isinstance(pool.operator, AveragePool2D)
        return mean if is_pool and size == divisor else None
    return None


def _max(ctx: Context) -> Sequence[int]:
    return _clipped(ctx, "low") or [ctx.add(Maximum(), *ctx.inputs)]


def _min(ctx: Context) -> Sequence[int]:
    return _clipped(ctx, "high") or [ctx.add(Minimum(), *ctx.inputs)]


def _clipped(ctx: Context, end: str) -> Sequence[int]:
    """A clip, if one operand is a known scalar; otherwise an empty list."""
    for x, index in zip(ctx.inputs, (1, 0), strict=True):
        bound = ctx.uniform(index)
        if bound is not None and ctx.shape(x) == ctx.shape(ctx.node.output):
            return [clip(ctx, x, **{end: bound})]
    return []


def clip(ctx: Context, x: int, low: float = -math.inf, high: float = math.inf) -> int:
    """Adds a clip, merged with a clip directly before it."""
    node = ctx.producer(x)
    if node is not None and isinstance(node.operator, Clip):
        low = min(max(low, node.operator.low), high)
        high = max(min(high, node.operator.high), low)
        x = node.inputs[0]
    if low == -math.inf and high == math.inf:
        return x
    return ctx.add(Clip(low, high), x)


def _clamp(ctx: Context) -> Sequence[int]:
    low, high = ctx.uniform(0), ctx.uniform(2)
    if low is None or high is None:
        raise NotTranslatable("its bounds are not two known numbers")
    return [clip(ctx, ctx.inputs[1], low, high)]


def _neg(ctx: Context) -> Sequence[int]:
    minus = ctx.builder.constant(np.float32(-1))
    return [ctx.add(Multiply(), *ctx.inputs, minus)]


def _integer_pow(ctx: Context) -> Sequence[int]:
    return [_power(ctx, ctx.inputs[0], ctx.params.get("y", 2))]


def _pow(ctx: Context) -> Sequence[int]:
    exponent = ctx.uniform(1)
    if exponent is None:
        raise NotTranslatable("its exponent is not one known number")
    return [_power(ctx, ctx.inputs[0], exponent)]


def _power(ctx: Context, x: int, exponent: float) -> int:
    if exponent in (0.5, -0.5):
        return ctx.add(Unary("sqrt" if exponent > 0 else "rsqrt"), x)
    if exponent == -1 and (root := _source(ctx, x, Unary("sqrt"))):
        return _inverse_of_root(ctx, root)
    if exponent not in (1, 2, 3, 4):
        raise NotTranslatable(
            f"there is no integer operator for the power {exponent:g}, only for 1 to "
            "4, 0.5 and -0.5"
        )
    result, count = x, int(exponent)
    if count == 4:
        x, count = ctx.add(Multiply(), x, x), 2
        result = x
    for _ in range(count - 1):
        result = ctx.add(Multiply(), result, x)
    return result


def _expm1(ctx: Context) -> Sequence[int]:
    exp = ctx.add(Unary("exp"), *ctx.inputs)
    return [ctx.add(Subtract(), exp, ctx.builder.constant(np.float32(1)))]


def _select_n(ctx: Context) -> Sequence[int]:
    if len(ctx.inputs) != 3:
        raise NotTranslatable("it selects one of more than two arrays")
    leaky = _leaky_relu(ctx)
    if leaky is not None:
        return [leaky]
    condition, if_false, if_true = ctx.inputs
    return [ctx.add(Select(), condition, if_true, if_false)]


def _leaky_relu(ctx: Context) -> int | None:
    """A leaky relu, if the equation selects x where positive, else a multiple of x."""
    compared, scaled = ctx.producer(ctx.inputs[0]), ctx.producer(ctx.inputs[1])
    x = ctx.inputs[2]
    if compared is None or scaled is None or x not in scaled.inputs:
        return None
    if not isinstance(compared.operator, Equation):
        return None
    if not isinstance(scaled.operator, Multiply):
        return None
    constants = ctx.builder.constants
    slope = constants.get(next((i for i in scaled.inputs if i != x), x))
    zero = constants.get(compared.inputs[-1])
    if (
        compared.operator.primitive not in ("ge", "gt")
        or compared.inputs[0] != x
        or zero is None
        or zero.any()
        or slope is None
        or slope.size != 1
    ):
        return None
    return ctx.add(LeakyRelu(float(slope.reshape(()))), x)


def _operator(operator: Any) -> Translation:
    return lambda ctx: [ctx.add(operator, *ctx.inputs)]


TRANSLATIONS: dict[str, Translation] = {
    "add": _add,
    "add_any": _add,
    "clamp": _clamp,
    "convert_element_type": _convert,
    "div": _div,
    "expm1": _expm1,
    "integer_pow": _integer_pow,
    "max": _max,
    "min": _min,
    "mul": _mul,
    "neg": _neg,
    "pow": _pow,
    "select_n": _select_n,
    "square": _integer_pow,
    "sub": _operator(Subtract()),
    **{
        name: _operator(Unary(name))
        for name in ("abs", "exp", "log", "logistic", "rsqrt", "sqrt", "tanh")
    },
}
