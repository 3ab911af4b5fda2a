"""Small NNX models that several test files share."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from aqtlite import config
from tests.common import normal

CFG = config.fully_quantized()


def call(model, *args):
    """A call, in `nnx.jit`."""
    return jitted(model, *args)


def values(node, *filters):
    """Copies of the variables of a node, as they are now, in NumPy arrays."""
    return jax.tree.map(_numpy, nnx.to_pure_dict(nnx.state(node, *filters)))


def _numpy(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


@nnx.jit
def jitted(model, *args):
    return model(*args)


class Mlp(nnx.Module):
    """Two layers, which may have functions injected."""

    def __init__(self, rngs, **kwargs):
        self.up = nnx.Linear(8, 16, rngs=rngs, **kwargs)
        self.down = nnx.Linear(16, 4, rngs=rngs, **kwargs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))

    def hidden(self, x):
        return self.up(x)


class Block(nnx.Module):
    """Attention, dropout and batch statistics."""

    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.mlp = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.dropout(self.mlp(x))


class Transformer(nnx.Module):
    """A tied embedding around blocks."""

    def __init__(self, rngs, count=2):
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(count)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


class Scanned(nnx.Module):
    """Layers stacked by `nnx.vmap`, run by `nnx.scan`."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def layers(rngs):
            return nnx.Linear(8, 8, rngs=rngs)

        self.layers = layers(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x, layer):
            return nnx.relu(layer(x))

        return run(x, self.layers)


class Stacked(Scanned):
    """Layers stacked along axis 1, in a scan by hand that writes all of them back."""

    def __init__(self, rngs):
        super().__init__(rngs)
        nnx.update(self.layers, _moved(nnx.state(self.layers), 0, 1))

    def __call__(self, x):
        graphdef, state = nnx.split(self.layers)

        @jax.checkpoint
        def run(x, state):
            layer = nnx.merge(graphdef, state)
            return nnx.relu(layer(x)), nnx.state(layer)

        x, state = jax.lax.scan(run, x, _moved(state, 1, 0))
        nnx.update(self.layers, _moved(state, 0, 1))
        return x


def _moved(state, source, destination):
    return jax.tree.map(lambda x: jnp.moveaxis(x, source, destination), state)


X = normal((4, 8))
TOKENS = jnp.array([[3, 1, 4, 1], [5, 9, 2, 6]])
