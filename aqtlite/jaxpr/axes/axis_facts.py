"""Facts about the axes of values: where they come from, and what masks set to zero.

A contraction may sum over elements that a mask has set to zero in one operand: over
later positions in attention. The facts tell which operand is masked along the axes that
are contracted, and which of its axes come from axes of the function's inputs: positions
and examples. They are approximate: an axis may come from fewer axes than a fact names,
and a mask that arrives as a float is not seen.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from aqtlite.shapes import processes

Source = tuple[int, int]
"""Index of an input of the function, and one of its axes."""

VERY_NEGATIVE = -1e4
"""A score at most this large has probability zero."""

_LARGEST_CONSTANT = 1 << 22
"""Number of elements up to which constants are searched for zeros."""


class AxisFact(NamedTuple):
    """What is known of one axis of a value."""

    sources: frozenset[Source] = frozenset()
    """Axes of inputs, other than parameters, that the axis comes from. None: an axis of
    features, which parameters and constants make."""

    varies: bool = True
    """Whether the value may vary along the axis; False where it is broadcast."""

    has_zeros: bool = False
    """Whether a mask that varies along the axis sets elements to zero."""

    has_floor: bool = False
    """Whether a mask that varies along the axis sets elements, or adds to them, so
    small a number that their exponential is zero."""

    is_normalized: bool = False
    """Whether the value was combined with one that does not vary along the axis, as a
    maximum or a sum along it is."""

    padding: tuple[int, int] = (0, 0)
    """Elements added before the first and after the last one."""


class Facts(NamedTuple):
    """What is known of a value."""

    axes: tuple[AxisFact, ...]
    is_constant: bool = False
    """Whether it depends on no input."""

    fill: float | None = None
    """The one number of which a constant consists; None if unknown."""

    is_exponential: bool = False
    """Whether it is an exponential, or a product of one."""

    is_amount: bool = False
    """Whether it is made of sums of products or of rounded numbers alone, which are no
    mask as integers."""

    def is_softmax(self, axis: int) -> bool:
        """Whether it is an exponential, normalized along an axis."""
        return self.is_exponential and self.axes[axis].is_normalized


PLAIN_AXIS = AxisFact()
"""An axis of which nothing is known."""

BROADCAST_AXIS = AxisFact(varies=False)
"""An axis along which all elements are equal."""


def of_input(index: int, ndim: int, *, is_parameter: bool) -> Facts:
    """Returns the facts about an input of the function."""
    if is_parameter:
        return Facts((PLAIN_AXIS,) * ndim)
    return Facts(tuple(AxisFact(frozenset({(index, i)})) for i in range(ndim)))


def unknown(ndim: int) -> Facts:
    """Returns the facts about a value of which nothing is known."""
    return Facts((PLAIN_AXIS,) * ndim)


def of_constant(value: Any) -> Facts:
    """Returns the facts about a constant of known or unknown values."""
    ndim = np.ndim(value)
    is_known = processes.is_readable(value)
    is_number = value.dtype == bool or any(
        jax.dtypes.issubdtype(value.dtype, kind) for kind in (np.integer, np.floating)
    )
    size = np.size(value)
    if not (is_known and is_number and 0 < size <= _LARGEST_CONSTANT):
        return Facts((PLAIN_AXIS,) * ndim, is_constant=True)
    array = np.asarray(value).astype(np.float32)
    zeros, floor = array == 0, array <= VERY_NEGATIVE
    axes = tuple(
        AxisFact(
            varies=_varies(array, axis),
            has_zeros=_varies(zeros, axis),
            has_floor=_varies(floor, axis),
        )
        for axis in range(ndim)
    )
    first = array.flat[0]
    fill = float(first) if (array == first).all() else None
    return Facts(axes, is_constant=True, fill=fill)


def _varies(array: np.ndarray, axis: int) -> bool:
    return bool((array != array.take([0], axis)).any())


def without_masks(facts: Facts) -> Facts:
    """Returns the facts that hold in any step of a loop, given those before it."""
    return Facts(tuple(AxisFact(axis.sources) for axis in facts.axes))


def joined_axis(several: Sequence[AxisFact]) -> AxisFact:
    """Returns the fact about an axis that several values share."""
    return either(tuple(several)) if several else PLAIN_AXIS


def joined(several: Sequence[Facts]) -> Facts:
    """Returns facts about a value that is one of several of one rank."""
    axes = tuple(map(either, zip(*(one.axes for one in several), strict=True)))
    return Facts(
        axes,
        is_exponential=any(one.is_exponential for one in several),
        is_amount=all(one.is_amount for one in several),
    )


def either(axes: tuple[AxisFact, ...]) -> AxisFact:
    """Returns the fact about an axis that may be any of several, at least one."""
    if len(axes) == 1:
        return axes[0]
    return AxisFact(
        sources=frozenset().union(*(axis.sources for axis in axes)),
        varies=any(axis.varies for axis in axes),
        has_zeros=any(axis.has_zeros for axis in axes),
        has_floor=any(axis.has_floor for axis in axes),
        is_normalized=any(axis.is_normalized for axis in axes),
        padding=max(axis.padding for axis in axes),
    )
