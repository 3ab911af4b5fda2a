"""What is compared: a model as it is trained, and as it decodes with a cache."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

FLOAT, QWIX, INT8 = "float", "qwix int8", "int8"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the models and of the data."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    vocabulary: int = 64
    batch: int = 3
    length: int = 23
    chunk: int = 5


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model with its parameters."""

    params: Any
    train: Callable[[Any, jax.Array], jax.Array]
    """Function of parameters and tokens that returns log-probabilities."""

    decode: Callable[[Any, Any, jax.Array, Any], tuple[jax.Array, Any]]
    """Function of parameters, cache, tokens and the position of the first."""

    cache: Callable[[int, int], Any]
    """Function of the number of sequences and of positions; returns an empty cache."""

    takes_chunks: bool = False
    """Whether a step takes several tokens; Flax's own caches take one."""
