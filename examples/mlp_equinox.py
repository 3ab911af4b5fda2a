"""An Equinox module that trains in int8 and serves its integers.

Run ``python examples/mlp_equinox.py``; it needs equinox.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import aqtlite
from aqtlite import Rule, config


def sample(key, rows=512):
    """Rows of 8 numbers, and two functions of each."""
    x = jax.random.normal(key, (rows, 8))
    return x, jnp.sin(3 * x[:, :2]) * x[:, 2:4]


def main():
    """Trains in float32 and in int8, and serves the latter."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--smoke", action="store_true", help="a few steps, as a check")
    args = parser.parse_args()
    steps = 2 if args.smoke else args.steps

    x, y = sample(jax.random.key(0))  # held out
    mlp = eqx.nn.MLP(8, 2, width_size=128, depth=3, key=jax.random.key(1))
    arrays, static = eqx.partition(mlp, eqx.is_array)

    def apply(arrays, x):
        return jax.vmap(eqx.combine(arrays, static))(x)

    # All layers but the last; its path is that of its array, "layers/3/weight".
    rules = [
        Rule(path="layers/3/.*", cfg=None),
        Rule(operands="weight", cfg=config.fully_quantized()),
    ]
    quantized = aqtlite.quantize_function(apply, rules, params=0)
    print(quantized.plan(arrays, x))

    optimizer = optax.adam(2e-3)

    def train(function):
        def loss_fn(arrays, x, y):
            return jnp.mean((function(arrays, x) - y) ** 2)

        @jax.jit
        def step(arrays, state, key):
            gradients = jax.grad(loss_fn)(arrays, *sample(key))
            updates, state = optimizer.update(gradients, state)
            return eqx.apply_updates(arrays, updates), state

        trained, state = arrays, optimizer.init(arrays)
        for key in jax.random.split(jax.random.key(2), steps):
            trained, state = step(trained, state, key)
        return trained, jax.jit(loss_fn)(trained, x, y)

    _, float_loss = train(apply)
    trained, loss = train(quantized)
    print(f"mean squared error: float32 {float_loss:.4f}, int8 {loss:.4f}")

    serve, serving = aqtlite.convert_function(quantized, trained, x)
    equal = jnp.all(jax.jit(serve)(serving, x) == jax.jit(quantized)(trained, x))
    print("served equals trained:", bool(equal))


if __name__ == "__main__":
    main()
