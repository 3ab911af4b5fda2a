"""Sums of products of int8 with integers in planes of bytes by a kernel.

`plane_kernel` is called where there is one (`panel_products.is_available`). Sums of
integers are exact: they equal those of what `planes.unpack` returns.
"""

import jax
import jax.numpy as jnp

from aqtlite.lowering.forms import plane_kernel, planes, products_of_bytes

# More rows take less time in the forms of XLA, which unpack once.
_ROWS = 16


def reads(rows: int, length: int) -> bool:
    """Returns True if there is a kernel for such operands, and it takes less time.

    Args:
        rows: rows of the other operand, for each matrix of planes.
        length: number of positions.
    """
    return 0 < rows <= _ROWS and length >= plane_kernel.POSITIONS


def of_channels(x: jax.Array, packed: jax.Array, bits: int) -> jax.Array:
    """Sums over channels.

    Args:
        x: int8, ``(batch, rows, channels)``.
        packed: `planes.pack` of integers, ``(batch, bytes, positions)``.
        bits: bits of an integer.

    Returns:
        int32, ``(batch, rows, positions)``.
    """
    batch, rows, depth = x.shape
    slabs, size = len(planes.pieces(bits)), planes.rows(depth, bits)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, slabs * size - depth)))
    x = x.reshape(batch, rows, slabs, size)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, -size % plane_kernel.ROWS)))
    x = x.reshape(batch, rows, -1)
    return _call(plane_kernel.OfChannels, x, packed, packed.shape[-1], bits)


def of_positions(
    x: jax.Array, packed: jax.Array, channels: int, bits: int
) -> jax.Array:
    """Sums over positions.

    Args:
        x: int8, ``(batch, rows, positions)``.
        packed: `planes.pack` of integers, ``(batch, bytes, positions)``.
        channels: number of channels.
        bits: bits of an integer.

    Returns:
        int32, ``(batch, rows, channels)``.
    """
    return _call(plane_kernel.OfPositions, x, packed, channels, bits)


def _call(
    kind: type[plane_kernel.PlaneFunction],
    x: jax.Array,
    packed: jax.Array,
    columns: int,
    bits: int,
) -> jax.Array:
    instructions = products_of_bytes.of_processor()
    assert instructions is not None
    name = plane_kernel.registered(kind, bits, instructions)
    out = jax.ShapeDtypeStruct((*x.shape[:2], columns), jnp.int32)
    return jax.ffi.ffi_call(name, out, vmap_method="broadcast_all")(packed, x)
