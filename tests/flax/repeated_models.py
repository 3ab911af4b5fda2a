"""Linen models by rules whose layers are called several times.

Each call has calibration states of its own, or those of the steps of a scan, and so has
each frozen weight.
"""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from tests.flax.random_parts import (
    VOCABULARY,
    Model,
    OfTokens,
    Settings,
    activation,
)


def _dense(settings: Settings, **kwargs: Any) -> nn.Dense:
    kwargs = {"use_bias": settings.use_bias, "dtype": settings.dtype, **kwargs}
    return nn.Dense(settings.width, **kwargs)


def _between(settings: Settings, x: Any) -> Any:
    """Makes the next call's inputs others than those before, in each channel.

    Bounded, as float16 needs it.
    """
    outliers = 1 + jnp.arange(x.shape[-1]) % 5
    return jnp.tanh(activation(settings, x)) * outliers.astype(x.dtype)


class Repeated(Model):
    """A layer that is called several times, between others that are called once."""

    @nn.compact
    def __call__(self, x):
        layer = _dense(self.settings, name="shared")
        for _ in range(1 + self.settings.depth):
            x = _between(self.settings, layer(x))
        return _dense(self.settings)(x)


class Rematerialized(Model):
    """A layer that is called twice, under `nn.remat`."""

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(nn.Dense)(
            self.settings.width, dtype=self.settings.dtype, name="shared"
        )
        return layer(_between(self.settings, layer(x)))


class Tied(OfTokens):
    """An embedding that is looked up, and contracted several times."""

    @nn.compact
    def __call__(self, tokens):
        width, dtype = self.settings.width, self.settings.dtype
        embed = nn.Embed(VOCABULARY, width, dtype=dtype, name="embed")
        x, heads = embed(tokens), []
        for _ in range(1 + self.settings.depth):
            x = _between(self.settings, _dense(self.settings)(x))
            heads.append(embed.attend(x))
        return sum(heads)


class _Step(nn.Module):
    settings: Settings

    @nn.compact
    def __call__(self, x, _):
        return _between(self.settings, _dense(self.settings)(x)), None


class Recurrent(Model):
    """A scan whose steps share a layer; called twice."""

    @nn.compact
    def __call__(self, x):
        steps = nn.scan(
            _Step,
            variable_broadcast="params",
            split_rngs={"params": False},
            length=1 + self.settings.depth,
        )(self.settings)
        for _ in range(2):
            x, _ = steps(x, None)
        return x


class Mixed(Model):
    """A scan whose steps have a layer each, and share one outside of it."""

    @nn.compact
    def __call__(self, x):
        shared = _dense(self.settings, name="shared")
        x = shared(x)
        weights = self.param(
            "own",
            nn.initializers.lecun_normal(batch_axis=0),
            (1 + self.settings.depth, x.shape[-1], x.shape[-1]),
        )

        def step(layer, x, own):
            x = _between(self.settings, layer(x))
            return _between(self.settings, x @ own.astype(x.dtype)), None

        scan = nn.scan(step, variable_broadcast="params", split_rngs={"params": False})
        x, _ = scan(shared, x, weights)
        return x


MODELS = (Repeated, Repeated, Rematerialized, Tied, Recurrent, Mixed)
SCANNED = (Recurrent, Mixed)
"""Models in whose scans statistics of gradients are refused."""
