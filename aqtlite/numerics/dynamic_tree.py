"""The dynamic 8-bit grid of optimizer states, decoded by table."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.numerics import base, fields
from aqtlite.shapes.sharding import looked_up

_DECADES = 7
_ZERO = 127
"""Code of zero on the signed grid."""


@functools.cache
def _values(is_signed: bool) -> np.ndarray:
    """The 256 values in ascending order, float32."""
    found = [0.0, 1.0]
    for i in range(_DECADES):
        ends = np.linspace(0.1, 1, 2 ** (i + (not is_signed)) + 1)
        means = (ends[:-1] + ends[1:]) / 2 * 10.0 ** (i - _DECADES + 1)
        found += [*means, *(-means if is_signed else ())]
    return np.sort(np.asarray(found, np.float64)).astype(np.float32)


class _Decade(NamedTuple):
    """A decade of values: the centers of equal cells."""

    threshold: np.float32
    """Largest magnitude that is rounded to a smaller value than those of the decade."""

    start: np.float32
    """Lower end of the first cell."""

    cells: np.float32
    """Number of cells per unit of magnitude."""

    first: int
    """Number of its first value, counted from zero on."""

    last: int
    """Number of its last value."""


@functools.cache
def _decades(is_signed: bool) -> tuple[_Decade, ...]:
    """The decades in ascending order, and 1 by itself."""
    values = _values(is_signed).astype(np.float64)
    values = values[values >= 0]
    found, first = [], 1
    for i in range(_DECADES + 1):
        threshold = (values[first - 1] + values[first]) / 2
        if i == 0 and not is_signed:
            threshold = 0.0  # What is above zero stays above zero.
        start = 10.0 ** (i - _DECADES)
        count = 2 ** (i + (not is_signed)) if i < _DECADES else 1
        cells = count / (9 * start) if count > 1 else 0.0
        found.append(
            _Decade(
                threshold=np.float32(threshold),
                start=np.float32(start),
                cells=np.float32(cells),
                first=first,
                last=first + count - 1,
            )
        )
        first += count
    return tuple(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicTree(base.Numerics):
    """The 256 values of dynamic tree quantization, up to 1, for optimizer states.

    Seven decades, of which the largest has the most values: 64 for each sign, or 128
    of the unsigned grid, and the smallest 1 or 2 (Dettmers et al. 2021, "8-bit
    Optimizers via Block-wise Quantization", arXiv:2110.02861). Values are rounded to
    the nearest, ties to the lower one. Stored as uint8 codes, in the order of the
    values, and decoded by table. The signed grid has 1 and no -1: its least value is
    -0.993.

    On the unsigned grid, for second moments, what is above zero stays above zero: a
    moment of zero would be divided by.

    >>> grid = DynamicTree()
    >>> codes = grid.round(jnp.array([-1.0, 0.0, 3e-7, 0.5, 1.0]), None)
    >>> grid.decode(codes).round(7).tolist()
    [-0.992968738079071, 0.0, 6.000000212225132e-07, 0.5007811784744263, 1.0]

    Raises:
        TypeError: if `signed` is not a bool.
    """

    signed: bool = True
    """Whether there are negative values. Without, they are rounded to zero."""

    def __post_init__(self) -> None:
        fields.check(self, signed=fields.flag)

    @property
    def bound(self) -> float:
        return 1.0

    @property
    def storage_dtype(self) -> np.dtype:
        return np.dtype("uint8")

    @property
    def name(self) -> str:
        return "dynamic8" if self.signed else "udynamic8"

    @property
    def arithmetic(self) -> base.Arithmetic:
        return "table"

    def round(self, scaled: jax.Array, noise: jax.Array | None) -> jax.Array:
        del noise
        size = jnp.abs(scaled)
        start = cells = jnp.zeros_like(size)
        first = last = jnp.zeros(size.shape, jnp.int32)
        for one in _decades(self.signed):
            is_above = size > one.threshold
            start = jnp.where(is_above, one.start, start)
            cells = jnp.where(is_above, one.cells, cells)
            first = jnp.where(is_above, one.first, first)
            last = jnp.where(is_above, one.last, last)
        # A product of a difference is not contracted to an FMA.
        cell = jnp.floor((size - start) * cells).astype(jnp.int32)
        number = jnp.clip(first + cell, first, last)
        if not self.signed:
            code = jnp.where(scaled > 0, number, 0)
        else:
            negative = _ZERO - jnp.minimum(number, _ZERO)
            code = jnp.where(scaled < 0, negative, _ZERO + number)
        return code.astype(self.storage_dtype)

    def decode(self, stored: jax.Array) -> jax.Array:
        # An unsigned index needs no handling of negative indices.
        return looked_up(jnp.asarray(_values(self.signed)), stored.astype(jnp.uint32))
