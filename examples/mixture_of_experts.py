"""A mixture of experts in Linen, whose experts are contracted in int8.

Tokens are sorted by their expert, so that `lax.ragged_dot` contracts each group of rows
with the weights of one expert. Run ``python examples/mixture_of_experts.py``.
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from aqtlite import config
from aqtlite.flax import AqtDotGeneral, AqtRaggedDot, convert


class Experts(nn.Module):
    """Each token goes through the expert that a router chooses."""

    experts: int
    width: int
    cfg: config.DotGeneral | None

    @nn.compact
    def __call__(self, x):
        # The router stays in float: it is small, and decides about everything.
        routes = nn.softmax(nn.Dense(self.experts, name="router")(x))
        expert = routes.argmax(-1)
        order = jnp.argsort(expert)
        sizes = jnp.bincount(expert, length=self.experts)

        features = x.shape[-1]
        init = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", init, (self.experts, features, self.width))
        down = self.param("down", init, (self.experts, self.width, features))
        ragged_dot = AqtRaggedDot(self.cfg)  # cfg=None: plain lax.ragged_dot
        rows = nn.gelu(ragged_dot(x[order], up, sizes))
        rows = ragged_dot(rows, down, sizes)
        out = rows[jnp.argsort(order)]
        return out * jnp.take_along_axis(routes, expert[:, None], axis=-1)


class Model(nn.Module):
    """A layer of experts between two dense layers."""

    experts: int
    cfg: config.DotGeneral | None

    @nn.compact
    def __call__(self, x):
        dot_general = AqtDotGeneral(self.cfg)
        x = nn.Dense(64, dot_general=dot_general)(x)
        x = x + Experts(self.experts, 128, self.cfg)(nn.LayerNorm()(x))
        return nn.Dense(1, dot_general=dot_general)(x)[:, 0]


def sample(key, rows):
    """Rows of 16 numbers, and a function of them that is another one in each half."""
    x = jax.random.normal(key, (rows, 16))
    y = jnp.where(x[:, 0] > 0, jnp.sin(3 * x[:, 1]), x[:, 2] * x[:, 3])
    return x, y


def main():
    """Trains in float32 and in int8, and serves the latter."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--smoke", action="store_true", help="a few steps, as a check")
    args = parser.parse_args()
    steps, rows = (2, 64) if args.smoke else (args.steps, 512)

    x, y = sample(jax.random.key(0), rows)  # held out
    optimizer = optax.adam(2e-3)

    for name, cfg in (("float32", None), ("int8", config.fully_quantized())):
        model = Model(experts=4, cfg=cfg)
        variables = jax.jit(model.init)(jax.random.key(1), x)
        state = optimizer.init(variables)

        @jax.jit
        def loss_fn(variables, x, y, model=model):
            return jnp.mean((model.apply(variables, x) - y) ** 2)

        @jax.jit
        def step(variables, state, key, loss_fn=loss_fn):
            gradients = jax.grad(loss_fn)(variables, *sample(key, rows))
            updates, state = optimizer.update(gradients, state)
            return optax.apply_updates(variables, updates), state

        for key in jax.random.split(jax.random.key(2), steps):
            variables, state = step(variables, state, key)
        print(f"{name:8s} mean squared error {loss_fn(variables, x, y):.4f}")

    serving = convert(model, variables, x, report=print)
    apply = jax.jit(model.apply)
    equal = jnp.all(apply(serving, x) == apply(variables, x))
    print("served equals trained:", bool(equal))


if __name__ == "__main__":
    main()
