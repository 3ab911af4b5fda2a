"""Placeholder values of a frozen parameter.

A layer asks for its kernel before it calls `dot_general`. It gets a few numbers that no
other parameter has, and NaN everywhere else. From the numbers a contraction tells which
parameter it was given, and how transposed, sliced or scaled
(`aqtlite.flax.linen.bare.fingerprints`); anything else that reads the parameter gets
NaN.

The values are small literals, broadcast along the other axes and concatenated. XLA
folds all that a contraction reads of them to constants, so a compiled program contains
none of them.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.program.serving.placeholder import Placeholder

LARGEST_LITERAL = 2**16
"""Largest number of elements in a literal that varies along several axes."""

_EXPONENTS = 21
_MANTISSAS = 64
_CODES = 2 * _MANTISSAS * _EXPONENTS
_PIECE = 1013


def values_of(placeholder: Placeholder) -> jax.Array:
    """Returns the array that stands for a frozen parameter."""
    with jax.debug_nans(False):
        if not any(placeholder.sliced):
            one = placeholder
            return _with_corners(one.number, one.shape, one.dtype)
        return _with_rows(placeholder)


def _with_corners(number: int, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """Returns NaN except in the first element and the last one along each axis.

    An axis of size two has no last number, so that any sum along an axis is NaN.
    """
    if not shape:
        return jnp.asarray(_numbers(np.asarray(number)), dtype)
    lasts = {
        axis: float(_numbers(np.asarray(number + (axis + 1) * _PIECE)))
        for axis, size in enumerate(shape)
        if size > 2
    }
    return _slab(float(_numbers(np.asarray(number))), lasts, shape, 0, dtype)


def _slab(
    first: float,
    lasts: dict[int, float],
    shape: tuple[int, ...],
    axis: int,
    dtype: np.dtype,
) -> jax.Array:
    """Returns the slice of `_with_corners` at index 0 of all axes before `axis`.

    Args:
        first: the first element.
        lasts: the last element along each axis from `axis` on.
        shape: shape of the slice.
        axis: axis of the whole array that is the slice's first.
        dtype: dtype of the result.
    """
    size, *below = shape
    if not below:
        row = np.full(size, np.nan, np.float32)
        row[0] = first
        if axis in lasts:
            row[-1] = lasts[axis]
        return jnp.asarray(row.astype(dtype))
    rest = tuple(below)
    others = {a: value for a, value in lasts.items() if a > axis}
    pieces = [_slab(first, others, rest, axis + 1, dtype)[None]]
    count = size - 1 - (axis in lasts)
    if count:
        pieces.append(jnp.full((count, *rest), jnp.nan, dtype))
    if axis in lasts:
        pieces.append(_slab(lasts[axis], {}, rest, axis + 1, dtype)[None])
    return lax.concatenate(pieces, 0)


def _with_rows(placeholder: Placeholder) -> jax.Array:
    """Returns numbers that vary along the sliced axes, with NaN between them."""
    shape = placeholder.shape
    strides = _strides(shape, placeholder.sliced)
    steady = [axis for axis, size in enumerate(shape) if size > 1 > strides[axis]]
    return _pieces(placeholder, shape, strides, steady[-2:], 0)


def _pieces(
    placeholder: Placeholder,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    axes: list[int],
    at: int,
) -> jax.Array:
    """Concatenates two literals along each of `axes`: first index, and the rest.

    This marks the beginning of axes along which the literal does not vary.
    """
    if not axes:
        varied = tuple(axis for axis, stride in enumerate(strides) if stride)
        values = _literal(
            placeholder.number + at * _PIECE,
            tuple(shape[axis] for axis in varied),
            tuple(strides[axis] for axis in varied),
        )
        literal = jnp.asarray(values.astype(placeholder.dtype))
        return lax.broadcast_in_dim(literal, shape, varied)
    axis, *others = axes
    pieces = [
        _pieces(
            placeholder,
            (*shape[:axis], size, *shape[axis + 1 :]),
            strides,
            others,
            2 * at + i,
        )
        for i, size in enumerate((1, shape[axis] - 1))
    ]
    return lax.concatenate(pieces, axis)


def _strides(shape: tuple[int, ...], sliced: tuple[bool, ...]) -> tuple[int, ...]:
    """Chooses where a placeholder has numbers.

    Values must differ where two weights of equal shape can come from one parameter:
    along sliced axes, and between axes of equal size, which may be transposed. One more
    axis, the gap, has a number at its first index and NaN after it.

    Returns:
        For each axis, the stride between numbers, with NaN in between; 0 for an axis
        along which values do not vary.
    """
    long = [axis for axis, size in enumerate(shape) if size > 1]
    along = [axis for axis in long if sliced[axis]]
    repeated = [
        axis for axis in long if shape[axis] in shape[:axis] and not sliced[axis]
    ]
    others = sorted((a for a in long if not sliced[a]), key=lambda axis: shape[axis])
    gaps = repeated[:1] or others[:1]
    for varied in ({*along, *repeated, *gaps}, {*along, *gaps}):
        if len(varied) < 2 or math.prod(shape[a] for a in varied) <= LARGEST_LITERAL:
            break
    else:
        # A literal along one axis: numbers at likely places to slice, NaN between.
        varied, gaps = set(along[-1:]), []
    strides = [int(axis in varied) for axis in range(len(shape))]
    if gaps:
        strides[gaps[0]] = shape[gaps[0]]
    elif varied:
        last = max(varied)
        strides[last] = next((s for s in (8, 4, 2, 3) if shape[last] % s == 0), 1)
    return tuple(strides)


def _literal(
    number: int, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> np.ndarray:
    """Returns numbers at the multiples of the strides, and NaN elsewhere.

    Two different numbers differ by at least 2^-7 of the smaller, and all are exact in
    bfloat16 and float16. The first number tells 2,688 parameters apart.
    """
    position = np.arange(math.prod(sizes), dtype=np.int64).reshape(sizes)
    values = _numbers(number + position * 2654435761)
    for axis, stride in enumerate(strides):
        index = np.arange(sizes[axis]).reshape(-1, *(1,) * (len(sizes) - axis - 1))
        values = np.where(index % stride == 0, values, np.nan)
    return values.astype(np.float32)


def _numbers(codes: np.ndarray) -> np.ndarray:
    """Maps codes, modulo `_CODES`, to distinct numbers."""
    codes = codes % _CODES
    mantissa, rest = 1 + (codes % _MANTISSAS) / _MANTISSAS, codes // _MANTISSAS
    return np.ldexp(mantissa, rest // 2 % _EXPONENTS - 10) * (1 - 2 * (rest % 2))
