"""Sums of products of int8 with integers in planes of bytes by a kernel.

It is called where there is one (`panel_products.is_available`). Sums of integers are
exact: they equal those of what `planes.unpack` returns.
"""

import jax
import jax.numpy as jnp

from aqtlite.lowering.forms import (
    integer_products,
    plane_channels,
    plane_kernel,
    plane_positions,
    planes,
    processor,
)

# The forms of XLA unpack once for all rows: more rows take less time in them, with
# instructions for products of bytes and without.
_ROWS, _ROWS_WITHOUT_VNNI = 16, 64


def pays(rows: int, length: int) -> bool:
    """Returns True if the kernel takes such operands, in less time than XLA's forms.

    Args:
        rows: rows of the other operand, for each matrix of planes.
        length: number of positions.
    """
    has_dots = processor.adds_products_of_bytes()
    most = _ROWS if has_dots else _ROWS_WITHOUT_VNNI
    return 0 < rows <= most and length >= plane_channels.POSITIONS


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
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, -size % plane_channels.CHANNELS)))
    x = x.reshape(batch, rows, -1)
    return _call(plane_channels.OfChannels, x, packed, packed.shape[-1], bits)


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
    return _call(plane_positions.OfPositions, x, packed, channels, bits)


def _call(
    kind: type[plane_kernel.PlaneFunction],
    x: jax.Array,
    packed: jax.Array,
    columns: int,
    bits: int,
) -> jax.Array:
    instructions = integer_products.of_processor()
    assert instructions is not None
    name = plane_kernel.registered(kind, bits, instructions)
    out = jax.ShapeDtypeStruct((*x.shape[:2], columns), jnp.int32)
    # Mapped arrays get leading axes, which are further axes of the batch.
    return jax.ffi.ffi_call(name, out, vmap_method="broadcast_all")(packed, x)
