"""Keys and values of 2 to 4 bits, packed into bytes.

XLA stores an int4 in half a byte, but reads and writes it one by one, and has no type
of 3 bits. Here they are packed along the channels of a position, in `planes`.
"""

import dataclasses
import functools

import jax
import numpy as np

from aqtlite import config
from aqtlite.lowering.forms import planes
from aqtlite.numerics import IntSymmetric, Numerics
from aqtlite.qtensor.packed_planes import PackedPlanes
from aqtlite.qtensor.qtensor import QTensor


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["packed", "scale"],
    meta_fields=["dtype", "numerics", "depth", "rotation"],
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

    rotation: config.Hadamard | None = None
    """The rotation of the channels (``fwd.rotation``)."""

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
    is_small = isinstance(grid, IntSymmetric) and grid.bits in planes.WIDTHS
    return is_small and grid.has_zero


def pack(q: QTensor) -> Packed:
    """Packs quantized keys or values, ``(*batch, length, heads, depth)``."""
    grid = q.numerics
    if not isinstance(grid, IntSymmetric):
        raise TypeError(f"integers on {grid!r} are not packed")
    q = q.stored_in(_order(q.ndim))
    values = planes.pack(q.qvalue.astype(np.int8), grid.bits)
    return Packed(values, q.scale, q.dtype, grid, q.qvalue.shape[-2], q.rotation)


def as_qtensor(x: Packed) -> QTensor:
    """Returns keys or values whose integers stay packed until they are contracted."""
    values = PackedPlanes(x.packed, x.numerics.bits, x.depth)
    return QTensor(
        values,
        x.scale,
        x.dtype,
        _order(x.ndim),
        numerics=x.numerics,
        rotation=x.rotation,
    )


def _order(ndim: int) -> tuple[int, ...]:
    """Stores ``(*batch, heads, depth, length)``."""
    return (*range(ndim - 3), ndim - 2, ndim - 1, ndim - 3)
