"""Shapes, lazily read arrays, checksums, and `jax.random` keys as arrays."""

import dataclasses
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
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
    """Whether no value is NaN or infinite; tests a few million values at a time."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return True
    flat = x.reshape(-1)
    starts = range(0, flat.size, _CHUNK)
    return all(bool(np.isfinite(flat[i : i + _CHUNK]).all()) for i in starts)


def is_key(leaf: Any) -> bool:
    """Whether an array or abstract value has a `jax.random` key dtype."""
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def generator_of(keys: Any) -> Any:
    """The generator (`impl`) of keys, abstract or not: a name if JAX registers one."""
    found: list[Any] = []
    jax.eval_shape(lambda one: found.append(jax.random.key_impl(one)), keys)
    return found[0]


def as_key(data: Any, like: Any) -> jax.Array:
    """Wraps key data, as a checkpoint stores it, in a typed key.

    Args:
        data: the key data.
        like: a key of the same generator, or its abstract value.
    """
    return jax.random.wrap_key_data(data, impl=generator_of(like))


def shape_of_keys(generator: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """The abstract value of an array of keys.

    Raises:
        ValueError: if JAX has no such generator.
    """
    one = jax.eval_shape(lambda: jax.random.key(0, impl=generator))
    return jax.ShapeDtypeStruct(shape, one.dtype)
