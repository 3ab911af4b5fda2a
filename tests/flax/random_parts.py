"""What random models have in common: their settings, and their input."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from aqtlite import config

VOCABULARY = 24


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options that the parts of a model share."""

    cfg: config.DotGeneral
    width: int
    depth: int
    dtype: Any
    use_bias: bool
    activation: str
    norm: str


def activation(settings: Settings, x: jax.Array) -> jax.Array:
    functions = {"relu": nn.relu, "gelu": nn.gelu, "silu": nn.silu}
    return functions.get(settings.activation, lambda x: x)(x)


class Model(nn.Module):
    """A model of one floating input."""

    settings: Settings

    def sample_args(
        self, rng: np.random.Generator, batch: int, length: int | None
    ) -> tuple[jax.Array, ...]:
        """Random inputs, of rank 2 unless a length is given."""
        leading = (batch,) if length is None else (batch, length)
        x = rng.standard_normal((*leading, self.features()))
        return (jnp.asarray(x, self.settings.dtype),)

    def features(self) -> int:
        """The width of the input."""
        return self.settings.width


class OfTokens(Model):
    """A model of tokens."""

    def sample_args(self, rng, batch, length):
        shape = (batch,) if length is None else (batch, length)
        return (jnp.asarray(rng.integers(VOCABULARY, size=shape), jnp.int32),)
