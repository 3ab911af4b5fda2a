"""Configs of sub-channel blocks, and of tiles of a backward contraction."""

import dataclasses
import math
from typing import Any

from aqtlite.config import representation
from aqtlite.numerics import fields


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Blocks(representation.CompactRepr):
    """Blocks of an operand, with one scale each.

    The last contracting axis is split into blocks of `size` elements, or into `count`
    blocks; each index along the other contracting axes has blocks of its own, unless
    `span_others` is set. In a convolution, the window and the positions are not split:
    blocks split the features (in ``fwd`` and ``dlhs``) or the examples (in ``drhs``),
    separately in each group.

    >>> Blocks(size=32)  # 1 x 32, as in the OCP Microscaling formats
    Blocks(size=32)
    >>> Blocks(size=128, remaining_size=128)  # 128 x 128
    Blocks(size=128, remaining_size=128)
    >>> Blocks(size=32, fit=True).count_of(48), Blocks(size=32, fit=True).count_of(64)
    (2, 2)
    >>> Blocks(size=32, pad=True).padded(50)  # A block of 32 and one of 18.
    64

    Raises:
        TypeError: if a field is of another type than declared.
        ValueError: if not exactly one of `size` and `count` is given, if a number is
            below 1, or if both `fit` and `pad` are set.
    """

    size: int | None = None
    """Number of elements of the last contracting axis in a block."""

    count: int | None = None
    """Number of blocks along the last contracting axis."""

    remaining_size: int = 1
    """Number of elements of the last remaining axis in a block. Above 1, blocks are
    two-dimensional."""

    fit: bool = False
    """On an axis that the blocks do not divide, use the largest smaller size that
    divides it; or the smallest larger one, if the former is an eighth of the size or
    less, and the latter nearer. Without `fit` and `pad`, such an axis is an error."""

    pad: bool = False
    """On an axis that the blocks do not divide, make the last block shorter, by padding
    the operand with zeros. Padding changes no sum, and only calibrations that ignore
    zeros are allowed. For `dot_general` and `einsum`; other contractions reject axes
    that the blocks do not divide."""

    span_others: bool = False
    """Let blocks span the other contracting axes, as Qwix's tiles do. Of a kernel
    ``(heads, width, outputs)`` that is contracted along its first two axes, blocks then
    reach over all heads."""

    def __post_init__(self) -> None:
        size = fields.integer(1)
        either = fields.or_none(size)
        fields.check(self, size=either, count=either, remaining_size=size)
        flag = fields.flag
        fields.check(self, fit=flag, pad=flag, span_others=flag)
        if self.fit and self.pad:
            raise ValueError(
                "Blocks takes fit=True or pad=True: smaller blocks that divide an "
                "axis, or a last one that is shorter"
            )
        if (self.size is None) == (self.count is None):
            raise ValueError(
                f"Blocks takes a size or a count, got size={self.size} and "
                f"count={self.count}; give one of them"
            )

    def count_of(self, axis_size: int) -> int:
        """The number of blocks along a contracting axis.

        Args:
            axis_size: size of the axis, after padding.

        Raises:
            ValueError: if the blocks do not divide the axis and `fit` is not set.
        """
        if self.size is not None:
            return self._count(axis_size, self.size, f"size={self.size}")
        count = self.count or 1
        _check_known(axis_size)
        if self.fit or self.pad:
            return self._count(axis_size, math.ceil(axis_size / count), f"{count=}")
        if axis_size % count:
            raise ValueError(f"count={count} does not divide an axis of {axis_size}")
        return count

    def remaining_count_of(self, axis_size: int) -> int:
        """The number of blocks along the last remaining axis.

        Raises:
            ValueError: as for `count_of`.
        """
        what = f"remaining_size={self.remaining_size}"
        return self._count(axis_size, self.remaining_size, what)

    def padded(self, axis_size: int) -> int:
        """The size of a contracting axis, rounded up to whole blocks if `pad` is set.

        Raises:
            ValueError: if the size is symbolic, as in `jax.export`.
        """
        _check_known(axis_size)
        if not self.pad or not axis_size:
            return axis_size
        size = self.size or math.ceil(axis_size / (self.count or 1))
        return math.ceil(axis_size / size) * size

    def padded_remaining(self, axis_size: int) -> int:
        """The size of the last remaining axis, in whole blocks if `pad` is set."""
        _check_known(axis_size)
        if not self.pad:
            return axis_size
        return math.ceil(axis_size / self.remaining_size) * self.remaining_size

    def _count(self, axis_size: int, size: int, what: str) -> int:
        _check_known(axis_size)
        if axis_size == 0:
            return 1
        if self.fit:
            size = _fitting(axis_size, size)
        if axis_size % size:
            raise ValueError(f"{what} does not divide an axis of {axis_size}")
        return axis_size // size

    def __str__(self) -> str:
        first = f"{self.count} blocks" if self.size is None else f"{self.size}"
        return first if self.remaining_size == 1 else f"{first} x {self.remaining_size}"


def _fitting(axis_size: int, size: int) -> int:
    """The size of the blocks of an axis, near to `size`."""
    smaller = next(n for n in range(min(size, axis_size), 0, -1) if axis_size % n == 0)
    if smaller == axis_size or smaller * 8 > size:
        return smaller
    larger = next(n for n in range(size, axis_size + 1) if axis_size % n == 0)
    return larger if larger * smaller < size**2 else smaller


def _check_known(axis_size: Any) -> None:
    """Raises ValueError for a symbolic size, as in `jax.export`."""
    if not isinstance(axis_size, int):
        raise ValueError(
            f"size: blocks need axes of known sizes, and one is {axis_size}; export "
            "with a fixed size"
        )


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class LocalAqt(representation.CompactRepr):
    """Sub-channel tiles in a backward contraction.

    >>> LocalAqt(contraction_axis_shard_count=4)
    LocalAqt(contraction_axis_shard_count=4)

    Raises:
        TypeError: if the count is not an int.
        ValueError: if the count is below 1.
    """

    contraction_axis_shard_count: int
    """Number of tiles along the first contracting axis, each with a scale; in a
    convolution, along the features (in ``dlhs``) or the examples (in ``drhs``)."""

    def __post_init__(self) -> None:
        fields.check(self, contraction_axis_shard_count=fields.integer(1))
