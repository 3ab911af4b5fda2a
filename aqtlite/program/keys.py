"""Random keys of contractions, from one key of a call or config."""

import zlib
from typing import TYPE_CHECKING

import jax

if TYPE_CHECKING:
    from aqtlite.program.planned import PlannedContraction


def folded(key: jax.Array, one: "PlannedContraction") -> jax.Array:
    """Returns a key for a contraction, by its path."""
    return jax.random.fold_in(key, zlib.crc32(one.kept_as.encode()))


def of_steps(
    key: jax.Array, one: "PlannedContraction", lengths: tuple[int, ...]
) -> jax.Array:
    """Returns a key for each step of scans of some lengths around a contraction."""
    key = folded(key, one)
    return jax.random.split(key, lengths) if lengths else key
