"""Operands of contractions that only move the elements of the other operand.

Along the contracted axes they have a single element that is not zero: rows of an
identity or a permutation, the kernel that takes patches of an image, or
`jax.nn.one_hot` in place of a lookup.
"""

import math
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
import numpy as np

from aqtlite.jaxpr.recognition import producers
from aqtlite.jaxpr.recognition.producers import Value
from aqtlite.jaxpr.replacement import Location

Axes = frozenset[int]

_NONE: Axes = frozenset()

_STEPS = 16
"""Number of equations between a comparison and a contraction that are looked through.
"""


def is_one_hot(
    program: producers.Body,
    location: Location,
    index: int,
    axes: Collection[int],
    *,
    is_constant: bool,
) -> bool:
    """Whether an operand has at most one element other than zero along some axes.

    A constant is computed. Of other operands, this is known if they are made of a
    comparison with an iota along the axis, and conversions, masks and moves of it.

    Args:
        program: the whole program.
        location: location of the contraction.
        index: index of the operand.
        axes: the axes, as one.
        is_constant: whether the operand depends on no input.
    """
    found = producers.operands(program, location)
    if found is None:
        return False
    value = found[index]
    long = {axis for axis in axes if value.shape[axis] != 1}
    if len(long) == 1 and long <= single_axes(value):
        return True
    array = producers.computed(value) if is_constant else None
    if array is None:
        return False
    counts = np.sum(array != 0, axis=tuple(axes))
    return bool(np.max(counts, initial=0) <= 1)


def single_axes(value: Value, steps: int = _STEPS) -> Axes:
    """Returns the axes along each of which at most one element is not zero.

    Args:
        value: a value, as `producers.source`.
        steps: number of equations to look through.
    """
    eqn = value.maker
    if eqn is None or steps == 0:
        return _NONE
    name, inputs = eqn.primitive.name, value.inputs

    def single(one: Value) -> Axes:
        return single_axes(one, steps - 1)

    if name == "eq":
        first, second = inputs
        axes = range(len(value.shape))
        return frozenset(axis for axis in axes if _meets_once(first, second, axis))
    if name in ("mul", "and"):
        return single(inputs[0]) | single(inputs[1])
    if name == "select_n" and len(inputs) == 3:
        which, if_false, if_true = inputs
        if _is_zero(if_false):
            return single(which) | single(if_true)
        return single(if_false) if _is_zero(if_true) else _NONE
    if name == "pad" and not _is_zero(inputs[1]):
        return _NONE
    if name in _KEEPING_ZEROS:
        return single(inputs[0])
    if name in _MOVING:
        found = single(inputs[0])
        moved = _moved(value).items()
        return frozenset(axis for axis, before in moved if before in found)
    return _NONE


_KEEPING_ZEROS = frozenset(
    {
        "convert_element_type",
        "copy",
        "dynamic_slice",
        "name",
        "neg",
        "pad",
        "reduce_precision",
        "rev",
        "sharding_constraint",
        "slice",
    }
)
"""Operations that keep the axes of their first operand, and its zeros."""

_MOVING = frozenset({"broadcast_in_dim", "gather", "reshape", "squeeze", "transpose"})
"""Operations that keep the elements along axes that they move."""

_ELEMENTWISE = frozenset(
    {"add", "and", "clamp", "convert_element_type", "copy", "div", "floor", "max"}
    | {"min", "mul", "neg", "rem", "round", "select_n", "sign", "sub"}
)


def _meets_once(one: Value, other: Value, axis: int) -> bool:
    """Whether at most one element along an axis is equal in two values."""
    return (_is_distinct(one, axis) and _is_uniform(other, axis)) or (
        _is_distinct(other, axis) and _is_uniform(one, axis)
    )


def _is_distinct(value: Value, axis: int, steps: int = _STEPS) -> bool:
    """Whether no two elements along an axis are equal."""
    if not value.shape:
        return False
    constant = value.constant
    if constant is not None:
        return bool(
            np.all(np.diff(np.sort(np.asarray(constant), axis), axis=axis) != 0)
        )
    eqn = value.maker
    if eqn is None or steps == 0:
        return False
    name, inputs = eqn.primitive.name, value.inputs

    def distinct(one: Value, axis: int) -> bool:
        return _is_distinct(one, axis, steps - 1)

    if name == "iota":
        return eqn.params["dimension"] == axis and _counts(value, axis)
    if name == "convert_element_type":
        return _counts(value, axis) and distinct(inputs[0], axis)
    if name in ("add", "sub"):
        first, second = inputs
        return (distinct(first, axis) and _is_uniform(second, axis)) or (
            distinct(second, axis) and _is_uniform(first, axis)
        )
    if name in _MOVING:
        before = _moved(value).get(axis)
        return before is not None and distinct(inputs[0], before)
    return name in ("copy", "rev", "slice") and distinct(inputs[0], axis)


def _is_uniform(value: Value, axis: int, steps: int = _STEPS) -> bool:
    """Whether all elements along an axis are equal."""
    if not value.shape or value.shape[axis] == 1:
        return True
    constant = value.constant
    if constant is not None:
        array = np.asarray(constant)
        return bool(np.all(array == np.take(array, [0], axis)))
    eqn = value.maker
    if eqn is None or steps == 0:
        return False
    name, inputs = eqn.primitive.name, value.inputs
    if name == "iota":
        return bool(eqn.params["dimension"] != axis)
    if name == "broadcast_in_dim":
        axes = eqn.params["broadcast_dimensions"]
        if axis not in axes:
            return True
        before = axes.index(axis)
        return _is_uniform(inputs[0], before, steps - 1)
    if name in _MOVING:
        before = _moved(value).get(axis)
        return before is not None and _is_uniform(inputs[0], before, steps - 1)
    if name in _ELEMENTWISE:
        return all(_is_uniform(one, axis, steps - 1) for one in inputs)
    return False


def _counts(value: Value, axis: int) -> bool:
    """Whether the dtype of a value tells apart as many integers as an axis is long."""
    size, dtype = value.shape[axis], value.atom.aval.dtype
    if not isinstance(size, int):
        return bool(jnp.issubdtype(dtype, jnp.integer)) and dtype.itemsize >= 4
    if jnp.issubdtype(dtype, jnp.integer):
        return size - 1 <= jnp.iinfo(dtype).max
    return size <= 2 ** (jnp.finfo(dtype).nmant + 1)


def _is_zero(value: Value) -> bool:
    """Whether all elements are zero."""
    constant = value.constant
    if constant is not None:
        return not np.any(np.asarray(constant))
    eqn = value.maker
    is_moved = eqn is not None and eqn.primitive.name in (
        "broadcast_in_dim",
        "convert_element_type",
    )
    return is_moved and _is_zero(value.inputs[0])


def _moved(value: Value) -> dict[int, int]:
    """Returns the axes that an operation in `_MOVING` keeps whole.

    Returns:
        For each of these axes of the result, the axis of the operand.
    """
    eqn, (operand, *_) = value.maker, value.inputs
    before, after = operand.shape, value.shape
    name = eqn.primitive.name
    if name == "transpose":
        return dict(enumerate(eqn.params["permutation"]))
    if name == "broadcast_in_dim":
        axes = eqn.params["broadcast_dimensions"]
        pairs = zip(axes, range(len(before)), strict=True)
        return {out: axis for out, axis in pairs if before[axis] == after[out]}
    if name == "gather":
        return _gathered(eqn, before)
    kept = {place: axis for axis, place in _places(before)}
    return {axis: kept[place] for axis, place in _places(after) if place in kept}


def _gathered(eqn: Any, before: tuple[int, ...]) -> dict[int, int]:
    """Returns the axes of which a gather takes all elements, as `_moved`."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(len(before)) if axis not in gone]
    pairs = zip(numbers.offset_dims, kept, strict=True)
    return {out: axis for out, axis in pairs if sizes[axis] == before[axis]}


def _places(shape: tuple[int, ...]) -> list[tuple[int, tuple[int, int]]]:
    """Returns axes longer than one, each with its size and the size of what is before.

    A reshape keeps an axis that has both in both shapes.
    """
    return [
        (axis, (size, math.prod(shape[:axis])))
        for axis, size in enumerate(shape)
        if size != 1
    ]
