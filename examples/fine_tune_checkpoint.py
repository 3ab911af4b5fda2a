"""Fine-tuning a float checkpoint to 4-bit weights, from disk to disk.

A float network is trained and saved, as any run does. Then its checkpoint is restored,
rounded to 4-bit weights, fine-tuned, and converted for serving.
Run ``python examples/fine_tune_checkpoint.py``; it needs scikit-learn, for the digits.
"""

import argparse
import pathlib
import tempfile

import flax.linen as nn
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

from aqtlite import config
from aqtlite.checkpoint import convert_checkpoint, load_serving
from aqtlite.flax import quantize_model

MODEL = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(32), nn.relu, nn.Dense(10)])
DIGITS = load_digits()
PIXELS = np.float32(DIGITS.data / 16)
ORDER = np.random.default_rng(0).permutation(len(PIXELS))
TRAIN, TEST = ORDER[:1400], ORDER[1400:]


def train(model, params, steps, learning_rate):
    """A `TrainState` after so many steps."""
    state = TrainState.create(
        apply_fn=model.apply, params=params, tx=optax.adam(learning_rate)
    )

    @jax.jit
    def step(state, x, labels):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, x)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean()

        return state.apply_gradients(grads=jax.grad(loss_fn)(state.params))

    rng = np.random.default_rng(1)
    for _ in range(steps):
        batch = rng.choice(TRAIN, 64)
        state = step(state, PIXELS[batch], DIGITS.target[batch])
    return state


def accuracy(model, variables):
    """Of the test digits."""
    logits = jax.jit(model.apply)(variables, PIXELS[TEST])
    return np.mean(logits.argmax(-1) == DIGITS.target[TEST])


def main():
    """Trains, rounds, fine-tunes and converts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--smoke", action="store_true", help="a few steps, as a check")
    args = parser.parse_args()
    steps = 2 if args.smoke else args.steps

    with tempfile.TemporaryDirectory() as folder:
        run = pathlib.Path(folder)
        params = jax.jit(MODEL.init)(jax.random.key(0), PIXELS[:1])["params"]
        state = train(MODEL, params, steps, 1e-3)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(run / "float", state)
        print(f"float32                {accuracy(MODEL, {'params': state.params}):.2%}")

        # The checkpoint's parameters are those of the quantized model.
        with ocp.StandardCheckpointer() as checkpointer:
            params = checkpointer.restore(run / "float", state).params
        model = quantize_model(MODEL, config.qat(4))
        print(f"4 bits, rounded        {accuracy(model, {'params': params}):.2%}")
        state = train(model, params, steps, 3e-4)
        tuned = accuracy(model, {"params": state.params})
        print(f"4 bits, fine-tuned     {tuned:.2%}")

        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(run / "tuned", state)
        sample = jax.ShapeDtypeStruct((1, 64), "float32")
        source, target = run / "tuned", run / "serving"
        convert_checkpoint(source, target, model, sample, subtree="params")
        serving = load_serving(target, model)
        print(f"4 bits, served         {accuracy(model, serving):.2%}")


if __name__ == "__main__":
    main()
