"""Functions of one or two arrays, element by element."""

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
from aqtlite.edge.translation.base import NotTranslatable, Site, Translation


def _add(site: Site) -> Sequence[int]:
    for x, index in zip(site.inputs, (1, 0), strict=True):
        known = site.constant(index)
        if known is not None and (known <= MASKED_BELOW).any():
            return [_masked(site, x, known)]
    return [site.add(Add(), *site.inputs)]


def _masked(site: Site, x: int, known: np.ndarray) -> int:
    """A mask that is added: far below all values, integers have nothing like it."""
    kept = known > MASKED_BELOW
    if known[kept].any():
        rest = site.builder.constant(np.where(kept, known, np.float32(0)))
        x = site.add(Add(), x, rest)
    shape = site.shape(site.node.output)
    if site.shape(x) != shape:
        x = site.add(BroadcastTo(shape), x)
    mask = np.broadcast_to(kept, shape)
    below = np.full(shape, np.float32(known.min()))
    return site.add(
        Select(), site.builder.constant(mask), x, site.builder.constant(below)
    )


def _mul(site: Site) -> Sequence[int]:
    x, y = site.inputs
    for one, index in ((x, 1), (y, 0)):
        factor = site.uniform(index)
        if factor and (mean := _mean_of_sum(site, one, 1 / factor)):
            return [mean]
    return [site.add(Multiply(), x, y)]


def _div(site: Site) -> Sequence[int]:
    x, y = site.inputs
    divisor = site.uniform(1)
    if divisor is not None and (mean := _mean_of_sum(site, x, divisor)):
        return [mean]
    if site.is_static(1):
        one = site.builder.constant(np.float32(1))
        return [site.add(Multiply(), x, site.add(Divide(), one, y))]
    root = _source(site, y, Unary("sqrt"))
    if root is None:
        raise NotTranslatable(
            "LiteRT's quotients of integers are wrong where the numerator is small: "
            "divide by a known number or by a square root, or multiply by what you know"
        )
    (squared, *layouts) = root
    inverse = site.add(Unary("rsqrt"), squared)
    for layout in layouts:
        inverse = site.add(layout, inverse)
    return [site.add(Multiply(), x, inverse)]


def _source(site: Site, y: int, operator: Unary) -> list[Any] | None:
    """The input of an operator that gives y, and the layouts between, or None."""
    node = site.producer(y)
    if node is None:
        return None
    if isinstance(node.operator, Reshape | BroadcastTo):
        found = _source(site, node.inputs[0], operator)
        return None if found is None else [*found, node.operator]
    return [node.inputs[0]] if node.operator == operator else None


def _mean_of_sum(site: Site, x: int, divisor: float) -> int | None:
    """The mean, if x is a sum of `divisor` elements."""
    node = site.producer(x)
    if node is None:
        return None
    if isinstance(node.operator, Reshape):
        mean = _mean_of_sum(site, node.inputs[0], divisor)
        return None if mean is None else site.add(node.operator, mean)
    if isinstance(node.operator, Sum):
        (source,), axes = node.inputs, node.operator.axes
        count = math.prod(site.shape(source)[i] for i in axes)
        return site.add(Mean(axes), source) if math.isclose(count, divisor) else None
    if isinstance(node.operator, Multiply):
        # What pools a sum is a mean, times the size of the window.
        mean, factor = node.inputs
        pool, size = site.producer(mean), site.builder.constants.get(factor)
        is_pool = pool is not None and isinstance(pool.operator, AveragePool2D)
        return mean if is_pool and size == divisor else None
    return None


def _max(site: Site) -> Sequence[int]:
    return _clipped(site, "low") or [site.add(Maximum(), *site.inputs)]


def _min(site: Site) -> Sequence[int]:
    return _clipped(site, "high") or [site.add(Minimum(), *site.inputs)]


def _clipped(site: Site, end: str) -> Sequence[int]:
    """A clip, where one operand is one known number; nothing otherwise."""
    for x, index in zip(site.inputs, (1, 0), strict=True):
        bound = site.uniform(index)
        if bound is not None and site.shape(x) == site.shape(site.node.output):
            return [clip(site, x, **{end: bound})]
    return []


def clip(site: Site, x: int, low: float = -math.inf, high: float = math.inf) -> int:
    """Adds a clip, or makes one of it and of the clip that it follows."""
    node = site.producer(x)
    if node is not None and isinstance(node.operator, Clip):
        low = min(max(low, node.operator.low), high)
        high = max(min(high, node.operator.high), low)
        x = node.inputs[0]
    if low == -math.inf and high == math.inf:
        return x
    return site.add(Clip(low, high), x)


def _clamp(site: Site) -> Sequence[int]:
    low, high = site.uniform(0), site.uniform(2)
    if low is None or high is None:
        raise NotTranslatable("its bounds are not two known numbers")
    return [clip(site, site.inputs[1], low, high)]


def _neg(site: Site) -> Sequence[int]:
    minus = site.builder.constant(np.float32(-1))
    return [site.add(Multiply(), *site.inputs, minus)]


def _integer_pow(site: Site) -> Sequence[int]:
    return [_power(site, site.inputs[0], site.params.get("y", 2))]


def _pow(site: Site) -> Sequence[int]:
    exponent = site.uniform(1)
    if exponent is None:
        raise NotTranslatable("its exponent is not one known number")
    return [_power(site, site.inputs[0], exponent)]


def _power(site: Site, x: int, exponent: float) -> int:
    if exponent in (0.5, -0.5):
        return site.add(Unary("sqrt" if exponent > 0 else "rsqrt"), x)
    if exponent not in (1, 2, 3, 4):
        raise NotTranslatable(
            f"there is no integer operator for the power {exponent:g}, only for 1 to "
            "4, 0.5 and -0.5"
        )
    result, count = x, int(exponent)
    if count == 4:
        x, count = site.add(Multiply(), x, x), 2
        result = x
    for _ in range(count - 1):
        result = site.add(Multiply(), result, x)
    return result


def _expm1(site: Site) -> Sequence[int]:
    exp = site.add(Unary("exp"), *site.inputs)
    return [site.add(Subtract(), exp, site.builder.constant(np.float32(1)))]


def _select_n(site: Site) -> Sequence[int]:
    if len(site.inputs) != 3:
        raise NotTranslatable("it selects one of more than two arrays")
    leaky = _leaky_relu(site)
    if leaky is not None:
        return [leaky]
    condition, if_false, if_true = site.inputs
    return [site.add(Select(), condition, if_true, if_false)]


def _leaky_relu(site: Site) -> int | None:
    """A leaky relu, if it selects x where it is positive, and else a multiple of it."""
    compared, scaled = site.producer(site.inputs[0]), site.producer(site.inputs[1])
    x = site.inputs[2]
    if compared is None or scaled is None or x not in scaled.inputs:
        return None
    if not isinstance(compared.operator, Equation):
        return None
    if not isinstance(scaled.operator, Multiply):
        return None
    constants = site.builder.constants
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
    return site.add(LeakyRelu(float(slope.reshape(()))), x)


def _operator(operator: Any) -> Translation:
    return lambda site: [site.add(operator, *site.inputs)]


TRANSLATIONS: dict[str, Translation] = {
    "add": _add,
    "add_any": _add,
    "clamp": _clamp,
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
