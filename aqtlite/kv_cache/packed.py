"""Keys and values of 2 to 4 bits, packed into bytes.

XLA stores an int4 in half a byte, but reads and writes it one by one, and has no type
of 3 bits. Here the bits of a position are packed into uint8 along its channels, in
planes: 4 bits are one plane of 4 bits; 3 bits are a plane of their lower 2 bits and one
of their upper bit. A byte of a plane of w bits holds 8/w channels that lie as far apart
as possible, so that all channels are unpacked by shifts of whole arrays.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.numerics import IntSymmetric, Numerics
from aqtlite.qtensor.qtensor import QTensor

_PLANES = {2: (2,), 3: (2, 1), 4: (4,)}
"""Widths of the planes, from the lowest bits up."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["packed", "scale"],
    meta_fields=["dtype", "numerics", "depth"],
)
@dataclasses.dataclass(frozen=True)
class Packed:
    """Quantized keys or values of which a byte holds several; a pytree.

    >>> import jax.numpy as jnp
    >>> from aqtlite import kv_cache
    >>> cache = kv_cache.empty((2, 16, 4, 64), jnp.float32, kv_cache.config_for(3))
    >>> cache.key.shape, cache.key.packed.shape
    ((2, 16, 4, 64), (2, 4, 24, 16))
    """

    packed: jax.Array
    """Bytes, ``(*batch, heads, bytes, length)``."""

    scale: jax.Array
    """One scale per position and head, float32, ``(*batch, heads, 1, length)``."""

    dtype: np.dtype
    """Dtype of the keys or values that were quantized."""

    numerics: IntSymmetric
    """The grid."""

    depth: int
    """Number of channels of a head."""

    @property
    def ndim(self) -> int:
        """The rank of the array that is packed."""
        return self.packed.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array, ``(*batch, length, heads, depth)``."""
        *batch, heads, _, length = self.packed.shape
        return (*batch, length, heads, self.depth)


def is_packed(grid: Numerics) -> bool:
    """Whether caches pack the integers of a grid: symmetric ones of 2 to 4 bits."""
    is_small = isinstance(grid, IntSymmetric) and grid.bits in _PLANES
    return is_small and grid.has_zero


def pack(q: QTensor) -> Packed:
    """Packs quantized keys or values, ``(*batch, length, heads, depth)``."""
    grid = q.numerics
    if not isinstance(grid, IntSymmetric):
        raise TypeError(f"integers on {grid!r} are not packed")
    q = q.stored_in(_order(q.ndim))
    widths, depth = _PLANES[grid.bits], q.qvalue.shape[-2]
    slabs = 8 // min(widths)
    padding = [(0, 0)] * q.ndim
    padding[-2] = (0, -depth % slabs)
    values = jnp.pad(q.qvalue.astype(jnp.int8), padding)
    values = jax.lax.bitcast_convert_type(values, jnp.uint8)
    planes, lowest = [], 0
    for width in widths:
        bits = (values >> lowest) & np.uint8(2**width - 1)
        places = jnp.split(bits, 8 // width, axis=-2)
        shifted = [one << np.uint8(width * i) for i, one in enumerate(places)]
        planes.append(functools.reduce(jnp.bitwise_or, shifted))
        lowest += width
    return Packed(jnp.concatenate(planes, -2), q.scale, q.dtype, grid, depth)


def unpack(x: Packed) -> QTensor:
    """Unpacks keys or values to int8."""
    bits = x.numerics.bits
    widths = _PLANES[bits]
    slabs = 8 // min(widths)
    rows = -(-x.depth // slabs)
    values = [jnp.uint8(0)] * slabs
    first, lowest = 0, 0
    for width in widths:
        count = 8 // width
        here = slabs // count  # Slabs that share a place in the bytes.
        for slab in range(slabs):
            place, part = divmod(slab, here)
            start = first + part * rows
            taken = jax.lax.slice_in_dim(x.packed, start, start + rows, axis=-2)
            taken = (taken >> np.uint8(width * place)) & np.uint8(2**width - 1)
            values[slab] = values[slab] | (taken << np.uint8(lowest))
        first, lowest = first + here * rows, lowest + width
    # Extends the sign.
    top = np.uint8(2 ** (bits - 1))
    whole = (jnp.concatenate(values, -2) ^ top) - top
    whole = jax.lax.slice_in_dim(whole, 0, x.depth, axis=-2)
    qvalue = jax.lax.bitcast_convert_type(whole, jnp.int8)
    return QTensor(qvalue, x.scale, x.dtype, _order(x.ndim), numerics=x.numerics)


def _order(ndim: int) -> tuple[int, ...]:
    """Stores ``(*batch, heads, depth, length)``."""
    return (*range(ndim - 3), ndim - 2, ndim - 1, ndim - 3)
