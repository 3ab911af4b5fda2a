"""Combination of several `QTensor`s into one, and its checks."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import config
from aqtlite.qtensor.qtensor import QTensor

Arrays = Callable[[Sequence[Any]], Any]


def check_alike(what: str, arrays: Sequence[QTensor]) -> list[QTensor]:
    """Checks that arrays can be combined; returns them in their own order of axes."""
    for x in arrays:
        if not isinstance(x, QTensor):
            raise TypeError(
                f"{what} takes QTensors, and got {type(x).__name__}; quantize it, or "
                "give the result of .dequant() of the others"
            )
    if not arrays:
        raise ValueError(f"{what} takes one QTensor or more, and got none")
    first = arrays[0]
    for x in arrays[1:]:
        changes = [
            f"{name} {a} and {b}"
            for name, a, b in (
                ("rank", first.ndim, x.ndim),
                ("dtype", np.dtype(first.dtype).name, np.dtype(x.dtype).name),
                ("storage", first.qvalue.dtype.name, x.qvalue.dtype.name),
                ("a zero point", *(one.zero_point is not None for one in (first, x))),
                ("an offset", *(one.offset is not None for one in (first, x))),
                ("a gradient", *(one.unrounded is not None for one in (first, x))),
            )
            if a != b
        ]
        if first.numerics != x.numerics:
            changes += config.differences(first.numerics, x.numerics)
        if changes:
            raise TypeError(
                f"{what} of QTensors of shapes {first.shape} and {x.shape} that differ "
                f"in {'; '.join(changes)}. Quantize them alike (.astype changes the "
                "dtype, .stop_gradient drops the gradient), or use the results of "
                ".dequant() instead"
            )
    return [x.in_own_order() for x in arrays]


def check_other_axes(what: str, qs: Sequence[QTensor], axis: int) -> None:
    """Raises ValueError if sizes or blocks differ along any axis but one."""
    for other in range(qs[0].ndim):
        found = {(q.shape[other], q.scale.shape[other]) for q in qs}
        if other != axis and len(found) > 1:
            raise ValueError(
                f"{what} along axis {axis}: QTensors of shapes "
                f"{[q.shape for q in qs]} with scales of shapes "
                f"{[q.scale.shape for q in qs]} differ along axis {other}"
            )


def combine(qs: Sequence[QTensor], on_values: Arrays, on_scales: Arrays) -> QTensor:
    """Combines the values of arrays by one function, their scales by another."""
    first = qs[0]
    zero_points = [q.zero_point for q in qs]
    offsets = [q.offset for q in qs]
    unrounded = [q.unrounded for q in qs]
    return dataclasses.replace(
        first,
        qvalue=on_values([q.qvalue for q in qs]),
        scale=on_scales([q.scale for q in qs]),
        zero_point=None if first.zero_point is None else on_scales(zero_points),
        offset=None if first.offset is None else on_scales(offsets),
        unrounded=None if first.unrounded is None else on_values(unrounded),
        sums=None,
    )


def with_equal(what: str, result: QTensor, a: QTensor, b: QTensor) -> QTensor:
    """Returns a result that is only valid if `a` and `b` have equal scales.

    Its scales are NaN if the scales are traced and turn out to differ.

    Raises:
        ValueError: if the scales are known and differ.
    """
    # A NaN scale makes its channel NaN in either case.
    is_nan = jnp.isnan(a.scale) & jnp.isnan(b.scale)
    is_equal = jnp.all((a.scale == b.scale) | is_nan)
    if a.zero_point is not None:
        is_equal &= jnp.all(a.zero_point == b.zero_point)
    if a.offset is not None:
        is_equal &= jnp.all(a.offset == b.offset)
    if not isinstance(is_equal, jax.core.Tracer) and not is_equal:
        raise ValueError(
            f"{what}: elements would share a scale, but have others (or other zero "
            "points). Quantize them with one scale, for instance with "
            "calibration.Constant, or use the results of .dequant() instead"
        )
    nan = jnp.float32(jnp.nan)
    return dataclasses.replace(result, scale=jnp.where(is_equal, result.scale, nan))
