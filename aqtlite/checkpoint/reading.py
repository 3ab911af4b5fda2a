"""Reading the arrays of a converted checkpoint."""

from collections.abc import Mapping

import jax
import numpy as np

from aqtlite.checkpoint.arrays import checksum
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import Reader
from aqtlite.checkpoint.manifest import Manifest, Stored


def read(
    source: Reader,
    manifest: Manifest,
    name: str,
    shardings: Mapping[str, jax.sharding.Sharding],
) -> jax.Array | np.ndarray:
    """Reads one array, of the shape, dtype and checksum of the manifest."""
    stored = manifest.arrays[name]
    found = source.arrays.get(name)
    if found != stored.on_disk:
        raise CheckpointError(
            f"{name} in {source.path} is {found or 'missing'}; the manifest says "
            f"{stored.on_disk}"
        )
    info = stored.info
    sharding = shardings.get(name)
    # JAX has 64 bits only if they are enabled; elsewhere it would cut them off.
    fits = jax.dtypes.canonicalize_dtype(info.dtype) == info.dtype
    if sharding is not None and not fits:
        raise CheckpointError(
            f"{name} in {source.path} is {info}, which JAX cannot hold: enable "
            "jax_enable_x64"
        )
    if sharding is not None and not sharding.is_fully_addressable:
        return _read_slices(source, name, stored, sharding)
    raw = source.read(name)
    if checksum(raw) != stored.checksum:
        raise CheckpointError(
            f"{name} in {source.path} is damaged: its checksum is "
            f"{checksum(raw):08x}, and was {stored.checksum:08x} when it was written"
        )
    x = stored.packing.unpack(raw, info) if stored.packing else raw
    if sharding is not None:
        return jax.device_put(x, sharding)
    return jax.device_put(x, may_alias=False) if fits else x


def _read_slices(
    source: Reader, name: str, stored: Stored, sharding: jax.sharding.Sharding
) -> jax.Array:
    """Reads the slices of one array that this host's devices hold."""
    slices = source.slices(name)

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        index = index or ()
        if stored.packing:
            return stored.packing.unpack_slice(slices, stored.info, index)
        return slices[index]

    return jax.make_array_from_callback(stored.info.shape, sharding, read)
