"""Differences between the bits of two arrays, found and described."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from aqtlite.shapes import processes


def data(x: Any) -> np.ndarray:
    """Returns an array in NumPy; of random keys, their data.

    One that spans processes is gathered in all of them, each of which has to call this.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if processes.spans(x):
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)


def differing(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns where bits differ: NaN equals NaN, 0.0 and -0.0 differ.

    Args:
        first: array.
        second: array of the same shape and dtype.
    """
    differs: np.ndarray = (_bytes(first) != _bytes(second)).any(-1)
    if jnp.issubdtype(first.dtype, jnp.inexact):
        differs &= ~(np.isnan(first) & np.isnan(second))
    return differs


def describe(
    first: np.ndarray, second: np.ndarray, differs: np.ndarray, one: str, other: str
) -> str:
    """Says by how much arrays differ, and where first.

    Args:
        first: array.
        second: array of the same shape and dtype.
        differs: where they differ, or some of these elements; not empty.
        one: what the first array is.
        other: what the second array is.
    """
    wide = np.complex128 if jnp.iscomplexobj(first) else np.float64
    first, second = first.astype(wide), second.astype(wide)
    at = tuple(int(i) for i in np.argwhere(differs)[0])
    where = f"the first at {at}, {first[at]!s} {one} and {second[at]!s} {other}"
    first, second = first[differs], second[differs]
    is_finite = np.isfinite(first) & np.isfinite(second)
    if not is_finite.all():
        count = int((~is_finite).sum())
        return f"differ, {count} of them in being NaN or infinite; {where}"
    with np.errstate(all="ignore"):
        distance = np.abs(first - second)
        relative = distance / np.abs(first)
    return (
        f"differ, by up to {np.max(distance):.3g} (relative {np.max(relative):.3g}); "
        f"{where}"
    )


def _bytes(x: np.ndarray) -> np.ndarray:
    """Returns the bytes of each element, along a new last axis."""
    flat = np.frombuffer(x.tobytes(), np.uint8)
    return flat.reshape(*x.shape, x.dtype.itemsize)
