"""A convolutional network in Linen that trains in int8 and serves its integers.

Run ``python examples/digits_cnn_linen.py``; it needs scikit-learn, for the digits.
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

from aqtlite import config
from aqtlite.flax import convert, quantize_model


class Cnn(nn.Module):
    """Two convolutions and two dense layers."""

    @nn.compact
    def __call__(self, images):
        x = images
        for features in (16, 32):
            x = nn.relu(nn.Conv(features, (3, 3))(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(64)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(x)


@jax.jit
def train_step(state, images, labels):
    """One step of the optimizer, and the loss before it."""

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradients = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=gradients), loss


def main():
    """Trains, serves, and compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--float", action="store_true", help="train in float32")
    parser.add_argument("--smoke", action="store_true", help="a few steps, as a check")
    args = parser.parse_args()
    steps = 3 if args.smoke else args.steps

    digits = load_digits()
    images = np.float32(digits.images[..., None] / 16)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:1400], order[1400:]

    # int8 in the convolutions and dense layers, forward and backward.
    model = Cnn()
    if not args.float:
        model = quantize_model(model, config.fully_quantized())
    state = TrainState.create(
        apply_fn=model.apply,
        params=jax.jit(model.init)(jax.random.key(0), images[:1])["params"],
        tx=optax.adam(1e-3),
    )
    rng = np.random.default_rng(1)
    for step in range(steps):
        batch = rng.choice(train, 64)
        state, loss = train_step(state, images[batch], digits.target[batch])
        if step % 100 == 0:
            print(f"step {step:4d}  loss {loss:.4f}")

    apply = jax.jit(model.apply)
    variables = {"params": state.params}
    logits = apply(variables, images[test])
    print(f"test accuracy {np.mean(logits.argmax(-1) == digits.target[test]):.2%}")
    if args.float:
        return

    serving = convert(model, variables, images[test], report=print)
    served = apply(serving, images[test])
    print("served equals trained:", bool(jnp.all(served == logits)))


if __name__ == "__main__":
    main()
