"""Stored values of keys or values of a KV cache, in planes of bytes."""

import dataclasses
import functools

import jax
import numpy as np

from aqtlite.lowering.forms import planes
from aqtlite.qtensor.laid_out import PackedIntegers


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["packed"],
    meta_fields=["bits", "channels"],
)
@dataclasses.dataclass(frozen=True)
class PackedPlanes(PackedIntegers):
    """Integers of 2 to 4 bits, ``(*batch, channels, positions)``, in `planes`.

    >>> import jax.numpy as jnp
    >>> x = jnp.arange(-4, 4, dtype=jnp.int8).reshape(4, 2)
    >>> values = PackedPlanes(planes.pack(x, bits=3), bits=3, channels=4)
    >>> values.shape, bool((values.unpacked() == x).all())
    ((4, 2), True)
    """

    packed: jax.Array
    """uint8, ``(*batch, bytes, positions)``."""

    bits: int
    channels: int

    dtype = np.dtype("int8")

    @property
    def shape(self) -> tuple[int, ...]:
        *batch, _, positions = self.packed.shape
        return (*batch, self.channels, positions)

    def integers(self) -> jax.Array:
        return planes.unpack(self.packed, self.bits, self.channels)
