"""Shapes, lazily read arrays, and checksums."""

import dataclasses
import math
import zlib
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

_CHUNK = 1 << 22


@dataclasses.dataclass(frozen=True)
class ArrayInfo:
    """The shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class LazyArray:
    """An array to be written; `read` brings it into memory."""

    name: str
    info: ArrayInfo
    read: Callable[[], np.ndarray]


def as_bytes(x: np.ndarray) -> memoryview:
    """The bytes of an array, in row-major order."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8).data


def checksum(x: np.ndarray) -> int:
    """CRC-32 of the bytes, in row-major order."""
    return zlib.crc32(as_bytes(x))


def is_finite(x: np.ndarray) -> bool:
    """Checks that no value is NaN or infinite, a few million at a time."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return True
    flat = x.reshape(-1)
    starts = range(0, flat.size, _CHUNK)
    return all(bool(np.isfinite(flat[i : i + _CHUNK]).all()) for i in starts)
