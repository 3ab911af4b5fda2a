"""Integers of 2 to 4 bits in planes of bytes.

The bits of a position are packed into uint8 along its channels, in planes: 4 bits are
one plane of 4 bits; 3 bits are a plane of their lower 2 bits and one of their upper
bit. A byte of a plane of w bits holds 8/w channels that lie as far apart as possible,
so that all channels are unpacked by shifts of whole arrays.

The channels are thus cut into slabs of consecutive ones, as many as the narrowest plane
has channels in a byte, and the bytes of a position into blocks of as many rows as a
slab has channels.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

_PLANES = {2: (2,), 3: (2, 1), 4: (4,)}
"""Widths of the planes, from the lowest bits up."""

WIDTHS = tuple(_PLANES)
"""Numbers of bits of an integer."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Where some bits of the channels of a slab lie."""

    block: int
    """The block of bytes."""

    place: int
    """The lowest of the bits in a byte."""

    width: int
    """The number of bits."""

    lowest: int
    """The lowest of the bits in an integer."""


@functools.cache
def pieces(bits: int) -> tuple[tuple[Piece, ...], ...]:
    """Returns the pieces of each slab, of integers of a number of bits."""
    widths = _PLANES[bits]
    slabs = 8 // min(widths)
    found: list[list[Piece]] = [[] for _ in range(slabs)]
    first, lowest = 0, 0
    for width in widths:
        blocks = slabs * width // 8
        for slab, one in enumerate(found):
            place, block = divmod(slab, blocks)
            one.append(Piece(first + block, width * place, width, lowest))
        first, lowest = first + blocks, lowest + width
    return tuple(map(tuple, found))


def blocks(bits: int) -> int:
    """Returns the number of blocks of bytes."""
    return 1 + max(piece.block for slab in pieces(bits) for piece in slab)


def rows(depth: int, bits: int) -> int:
    """Returns the number of channels of a slab, of which the last are padding."""
    return -(-depth // len(pieces(bits)))


def pack(values: jax.Array, bits: int) -> jax.Array:
    """Packs integers, ``(..., channels, positions)``, to ``(..., bytes, positions)``.

    Args:
        values: int8, on the grid of `bits`.
        bits: 2 to 4.
    """
    padding = [(0, 0)] * values.ndim
    padding[-2] = (0, -values.shape[-2] % len(pieces(bits)))
    values = jax.lax.bitcast_convert_type(jnp.pad(values, padding), jnp.uint8)
    *batch, channels, length = values.shape
    planes, lowest = [], 0
    for width in _PLANES[bits]:
        places = _places(width, len(batch))
        taken = (values >> np.uint8(lowest)) & np.uint8(2**width - 1)
        taken = taken.reshape(*batch, places.size, channels // places.size, length)
        # A sum of disjoint bits: XLA:CPU has no bitwise reduction across devices.
        planes.append(jax.lax.reduce_sum(taken << places, (len(batch),)))
        lowest += width
    return jnp.concatenate(planes, -2)


def unpack(packed: jax.Array, bits: int, depth: int) -> jax.Array:
    """Unpacks what `pack` packed, to int8.

    Args:
        packed: uint8, ``(..., bytes, positions)``.
        bits: 2 to 4.
        depth: number of channels.
    """
    slabs, size = len(pieces(bits)), rows(depth, bits)
    *batch, _, length = packed.shape
    values, start, lowest = jnp.uint8(0), 0, 0
    for width in _PLANES[bits]:
        places = _places(width, len(batch))
        stop = start + size * slabs // places.size
        plane = jax.lax.slice_in_dim(packed, start, stop, axis=-2)
        taken = (jnp.expand_dims(plane, -3) >> places) & np.uint8(2**width - 1)
        taken = taken.reshape(*batch, slabs * size, length)
        values = values | (taken << np.uint8(lowest))
        start, lowest = stop, lowest + width
    # Extends the sign.
    top = np.uint8(2 ** (bits - 1))
    whole = (values ^ top) - top
    whole = jax.lax.slice_in_dim(whole, 0, depth, axis=-2)
    return jax.lax.bitcast_convert_type(whole, jnp.int8)


def _places(width: int, batch: int) -> np.ndarray:
    """The lowest bit of each piece of a byte, along the axis after `batch` axes.

    The axes of rows and positions follow.

    XLA:CPU shifts by them in one loop, which it vectorizes; it does not where slabs are
    cut out and joined.
    """
    places = np.arange(0, 8, width, dtype=np.uint8)
    return places.reshape((1,) * batch + (-1, 1, 1))
