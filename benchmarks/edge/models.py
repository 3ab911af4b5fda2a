"""Four kinds of small models for images of 8 x 8 pixels."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

CLASSES = 10


class Cnn(nn.Module):
    """Convolutions, each with BatchNorm and max pooling, and two dense layers."""

    train: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (32, 64):
            x = nn.Conv(features, (3, 3))(x)
            x = nn.relu(_normalized(x, self.train))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(128)(x.reshape(x.shape[0], -1)))
        return nn.Dense(CLASSES)(x)


class MobileNet(nn.Module):
    """Depthwise and pointwise convolutions with residuals, as in MobileNet."""

    train: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(32, (3, 3), use_bias=False)(x)
        x = nn.relu6(_normalized(x, self.train))
        for features, stride in ((64, 2), (64, 1), (128, 2), (128, 1)):
            y = nn.Conv(
                x.shape[-1],
                (3, 3),
                strides=stride,
                feature_group_count=x.shape[-1],
                use_bias=False,
            )(x)
            y = nn.relu6(_normalized(y, self.train))
            y = nn.Conv(features, (1, 1), use_bias=False)(y)
            y = _normalized(y, self.train)
            x = x + y if x.shape == y.shape else y
        return nn.Dense(CLASSES)(jnp.mean(x, axis=(1, 2)))


class Encoder(nn.Module):
    """A transformer encoder of two layers; rows of pixels are tokens."""

    train: bool = False
    width: int = 64

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(self.width)(x.reshape(x.shape[:3]))
        shape = (1, x.shape[1], self.width)
        x = x + self.param("positions", nn.initializers.normal(0.02), shape)
        for _ in range(2):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(4)(y, y)
            y = nn.gelu(nn.Dense(2 * self.width)(nn.LayerNorm()(x)))
            x = x + nn.Dense(self.width)(y)
        return nn.Dense(CLASSES)(nn.LayerNorm()(x).mean(axis=1))


class Mlp(nnx.Module):
    """Three dense layers, in NNX."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, 256, rngs=rngs)
        self.second = nnx.Linear(256, 128, rngs=rngs)
        self.head = nnx.Linear(128, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.first(x.reshape(x.shape[0], -1)))
        return self.head(nnx.relu(self.second(x)))


def _normalized(x: jax.Array, train: bool) -> jax.Array:
    return nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)


MODELS = {
    "CNN with BatchNorm": Cnn,
    "depthwise blocks": MobileNet,
    "MLP in NNX": Mlp,
    "transformer encoder": Encoder,
}
