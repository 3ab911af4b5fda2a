"""Algebra of axes for `jax.lax.dot_general`.

A dot_general is described by ``((lhs_ca, rhs_ca), (lhs_ba, rhs_ba))``: contracting and
batch axes of both operands. Every other axis is *remaining*. The axes of the output are
the batch axes, then the remaining axes of lhs, then the remaining axes of rhs.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

Side = Literal["lhs", "rhs"]
Axes = tuple[int, ...]
DimensionNumbers = tuple[tuple[Axes, Axes], tuple[Axes, Axes]]


def canonicalize(
    dimension_numbers: Any, lhs_shape: Sequence[int], rhs_shape: Sequence[int]
) -> DimensionNumbers:
    """Checks dimension numbers against the operands and returns them as plain tuples.

    Raises:
        ValueError: if an axis is out of range or named twice, if the two sides name
            different numbers of axes, or if paired axes differ in size.
        TypeError: if `dimension_numbers` is not nested as in `lax.dot_general`.
    """
    try:
        (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = (
            (tuple(int(axis) for axis in lhs), tuple(int(axis) for axis in rhs))
            for lhs, rhs in dimension_numbers
        )
    except (TypeError, ValueError) as error:
        raise TypeError(
            "dimension_numbers must be ((lhs_contracting, rhs_contracting), "
            f"(lhs_batch, rhs_batch)), each a sequence of ints; got "
            f"{dimension_numbers!r}"
        ) from error
    for side, axes, shape in (
        ("lhs", lhs_ca + lhs_ba, lhs_shape),
        ("rhs", rhs_ca + rhs_ba, rhs_shape),
    ):
        if any(not 0 <= axis < len(shape) for axis in axes):
            raise ValueError(
                f"dimension_numbers {dimension_numbers} name an axis that {side} of "
                f"shape {tuple(shape)} does not have"
            )
        if len(set(axes)) != len(axes):
            raise ValueError(
                f"dimension_numbers {dimension_numbers} name an axis of {side} twice"
            )
    for kind, lhs_axes, rhs_axes in (
        ("contracting", lhs_ca, rhs_ca),
        ("batch", lhs_ba, rhs_ba),
    ):
        lhs_sizes = [lhs_shape[axis] for axis in lhs_axes]
        rhs_sizes = [rhs_shape[axis] for axis in rhs_axes]
        if lhs_sizes != rhs_sizes:
            raise ValueError(
                f"the {kind} axes of lhs {tuple(lhs_shape)} and rhs "
                f"{tuple(rhs_shape)} differ in number or size: {lhs_axes} of sizes "
                f"{lhs_sizes} against {rhs_axes} of sizes {rhs_sizes}"
            )
    return (lhs_ca, rhs_ca), (lhs_ba, rhs_ba)


@functools.cache
def remaining_axes(ndim: int, contracting: Axes, batch: Axes) -> Axes:
    """The axes of an operand that are neither contracting nor batch, in order."""
    return tuple(a for a in range(ndim) if a not in contracting and a not in batch)


def shared_shape(shape: Sequence[int], axes: Iterable[int]) -> tuple[int, ...]:
    """Returns a keepdims shape, with size 1 along `axes`."""
    shared = set(axes)
    return tuple(1 if axis in shared else size for axis, size in enumerate(shape))


def transpose(dims: DimensionNumbers) -> DimensionNumbers:
    """Returns the dimension numbers of a contraction with lhs and rhs exchanged."""
    (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = dims
    return (rhs_ca, lhs_ca), (rhs_ba, lhs_ba)


def behind_new_axes(dims: DimensionNumbers, lhs: int, rhs: int) -> DimensionNumbers:
    """Returns the dimension numbers of operands with new leading axes.

    >>> behind_new_axes((((1,), (0,)), ((), ())), 1, 2)
    (((2,), (2,)), ((), ()))
    """

    def shift(axes: Axes, by: int) -> Axes:
        return tuple(axis + by for axis in axes)

    (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = dims
    contracting = shift(lhs_ca, lhs), shift(rhs_ca, rhs)
    return contracting, (shift(lhs_ba, lhs), shift(rhs_ba, rhs))


def for_gradient(
    side: Side,
    dims: DimensionNumbers,
    lhs_ndim: int,
    rhs_ndim: int,
    order: Axes | None = None,
) -> tuple[DimensionNumbers, Axes]:
    """Returns the contraction that gives the gradient of an operand.

    >>> for_gradient("rhs", (((1,), (0,)), ((), ())), 2, 2)
    ((((0,), (0,)), ((), ())), (1, 0))

    Args:
        side: Operand to differentiate with respect to.
        dims: Dimension numbers of the forward contraction.
        lhs_ndim: Rank of lhs.
        rhs_ndim: Rank of rhs.
        order: Permutation of the axes of the output; None for none.

    Returns:
        The dimension numbers of ``dot_general(g, other)``, with ``g`` the gradient of
        the output, and the permutation of its result's axes to the operand's order.
    """
    (lhs_ca, rhs_ca), (batch, _) = dims
    # Axes of the output: batch, remaining of lhs, remaining of rhs.
    first, second = len(batch), lhs_ndim - len(lhs_ca)
    axes = tuple(range(second + rhs_ndim - len(rhs_ca) - first))
    if order is not None:
        axes = tuple(order.index(axis) for axis in axes)
    g_ba, g_of_own, g_of_other = axes[:first], axes[first:second], axes[second:]
    own_ndim, other_ndim = lhs_ndim, rhs_ndim
    if side == "rhs":
        dims, own_ndim, other_ndim = transpose(dims), rhs_ndim, lhs_ndim
        g_of_own, g_of_other = g_of_other, g_of_own
    (own_ca, other_ca), (own_ba, other_ba) = dims
    own_ra = remaining_axes(own_ndim, own_ca, own_ba)
    other_ra = remaining_axes(other_ndim, other_ca, other_ba)
    # Axes of the result: batch, own remaining, own contracting in the other's order.
    kept = tuple(own_ra[i] for i in np.argsort(g_of_own))
    paired = tuple(own_ca[i] for i in np.argsort(other_ca))
    found = tuple(int(i) for i in np.argsort(own_ba + kept + paired))
    return ((g_of_other, other_ra), (g_ba, other_ba)), found


def scale_to_output(
    side: Side, scale: jax.Array, dims: DimensionNumbers, lhs_ndim: int, rhs_ndim: int
) -> jax.Array:
    """Lays out a keepdims scale of an operand to multiply the output."""
    is_lhs = side == "lhs"
    contracting, batch = (pair[0 if is_lhs else 1] for pair in dims)
    remaining = remaining_axes(scale.ndim, contracting, batch)
    others = (rhs_ndim if is_lhs else lhs_ndim) - len(batch) - len(contracting)
    sizes, ones = tuple(scale.shape[axis] for axis in remaining), (1,) * others
    rest = sizes + ones if is_lhs else ones + sizes
    shape = tuple(scale.shape[axis] for axis in batch) + rest
    return _laid_out(scale, batch + remaining, shape)


def _laid_out(x: jax.Array, axes: Axes, shape: tuple[int, ...]) -> jax.Array:
    """Permutes the axes of an array, and reshapes it.

    Args:
        x: array of size 1 along axes not in `axes`.
        axes: axes of `x`, in their new order.
        shape: sizes of `axes`, with ones between them.
    """
    if axes != tuple(sorted(axes)):
        x = x.transpose(axes + remaining_axes(x.ndim, axes, ()))
    return x.reshape(shape)


def rhs_scale_to_lhs(
    scale: jax.Array, dims: DimensionNumbers, lhs_ndim: int
) -> jax.Array:
    """Lays out a keepdims scale of rhs to multiply lhs.

    The scale must have size 1 along the remaining axes of rhs.
    """
    (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = dims
    pairs = zip(lhs_ca + lhs_ba, rhs_ca + rhs_ba, strict=True)
    return scale_along(scale, dict(pairs), lhs_ndim)


def scale_along(scale: jax.Array, axes: Mapping[int, int], ndim: int) -> jax.Array:
    """Lays out a keepdims scale of one array to multiply another.

    Args:
        scale: scale of size 1 along axes that `axes` does not name.
        axes: axes of the scale, by axis of the other array.
        ndim: rank of the other array.
    """
    pairs = sorted(axes.items())
    shape = [1] * ndim
    for axis, source in pairs:
        shape[axis] = scale.shape[source]
    return _laid_out(scale, tuple(source for _, source in pairs), tuple(shape))


def output_shape(
    dims: DimensionNumbers, lhs_shape: Sequence[int], rhs_shape: Sequence[int]
) -> tuple[int, ...]:
    """Returns the shape of a contraction's result."""
    (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = dims
    lhs_ra = remaining_axes(len(lhs_shape), lhs_ca, lhs_ba)
    rhs_ra = remaining_axes(len(rhs_shape), rhs_ca, rhs_ba)
    return (
        *(lhs_shape[a] for a in lhs_ba),
        *(lhs_shape[a] for a in lhs_ra),
        *(rhs_shape[a] for a in rhs_ra),
    )


def contraction_size(dims: DimensionNumbers, lhs_shape: Sequence[int]) -> int:
    """The number of products that are summed into one element of the output."""
    (lhs_ca, _), _ = dims
    return math.prod(lhs_shape[axis] for axis in lhs_ca)
