"""Config of sub-channel blocks."""

import dataclasses
import math
from typing import Any

from aqtlite.config import representation
from aqtlite.numerics import fields


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Blocks(representation.CompactRepr):
    """Blocks of an operand that have a scale each.

    The last contracting axis is cut into blocks of `size` elements, or into `count`
    blocks. Elements at other places along further contracting axes are in other blocks,
    except in a convolution, whose window and positions stay whole: features (in ``fwd``
    and ``dlhs``) or examples (in ``drhs``) are cut, those of each group by themselves.

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
            below 1, or if blocks are both to `fit` and to `pad`.
    """

    size: int | None = None
    """How many consecutive elements of the last contracting axis share a scale."""

    count: int | None = None
    """Into how many blocks the last contracting axis is cut."""

    remaining_size: int = 1
    """How many consecutive elements of the last axis that is not contracted share a
    scale: above 1, blocks are two-dimensional."""

    fit: bool = False
    """Where blocks do not divide an axis, take the largest ones that do, of at most
    this size. Without `fit` and `pad` it is an error."""

    pad: bool = False
    """Where blocks do not divide an axis, let the last one be shorter: the operand is
    padded with zeros, which add nothing to any sum, and change no scale of the
    calibrations that may be used. For `dot_general` and `einsum`; other contractions
    refuse what does not divide."""

    def __post_init__(self) -> None:
        size = fields.integer(1)
        either = fields.or_none(size)
        fields.check(self, size=either, count=either, remaining_size=size)
        fields.check(self, fit=fields.flag, pad=fields.flag)
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
        """The number of blocks of a contracting axis.

        Args:
            axis_size: size of the axis.

        Raises:
            ValueError: if the blocks do not divide it, unless they are to `fit`.
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
        """The number of blocks of the last axis that is not contracted.

        Raises:
            ValueError: as `count_of`.
        """
        what = f"remaining_size={self.remaining_size}"
        return self._count(axis_size, self.remaining_size, what)

    def padded(self, axis_size: int) -> int:
        """The size of a contracting axis in whole blocks.

        Raises:
            ValueError: if the blocks do not divide it, unless they are to `fit` or to
                `pad`.
        """
        _check_known(axis_size)
        if not self.pad or not axis_size:
            return axis_size
        size = self.size or math.ceil(axis_size / (self.count or 1))
        return math.ceil(axis_size / size) * size

    def padded_remaining(self, axis_size: int) -> int:
        """The size in whole blocks of the last axis that is not contracted."""
        _check_known(axis_size)
        if not self.pad:
            return axis_size
        return math.ceil(axis_size / self.remaining_size) * self.remaining_size

    def _count(self, axis_size: int, size: int, what: str) -> int:
        _check_known(axis_size)
        if axis_size == 0:
            return 1
        if self.fit:
            size = next(
                one for one in range(min(size, axis_size), 0, -1) if not axis_size % one
            )
        if axis_size % size:
            raise ValueError(f"{what} does not divide an axis of {axis_size}")
        return axis_size // size

    def __str__(self) -> str:
        first = f"{self.count} blocks" if self.size is None else f"{self.size}"
        return first if self.remaining_size == 1 else f"{first} x {self.remaining_size}"


def _check_known(axis_size: Any) -> None:
    """Raises ValueError for a symbolic size, as of `jax.export`."""
    if not isinstance(axis_size, int):
        raise ValueError(
            f"size: blocks need axes of known sizes, and one is {axis_size}; export "
            "with a fixed size"
        )
