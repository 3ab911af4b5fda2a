"""A classifier for the edge: trained in float, exported to int8, run by LiteRT.

The part that runs on a device, `classify`, needs LiteRT's interpreter and NumPy alone.
Run ``python examples/edge_app.py``; it needs ``aqtlite[edge]`` and scikit-learn.
"""

import argparse
import pathlib
import tempfile

import flax.linen as nn
import jax
import numpy as np
import optax
from ai_edge_litert.interpreter import Interpreter
from sklearn.datasets import load_digits

from aqtlite import edge


class Classifier(nn.Module):
    """A small convolutional network."""

    @nn.compact
    def __call__(self, images):
        x = nn.relu(nn.Conv(8, (3, 3))(images))
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Conv(16, (3, 3))(x))
        x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


def train(images, labels, steps):
    """Variables of the float model."""
    model, optimizer = Classifier(), optax.adam(3e-3)
    variables = jax.jit(model.init)(jax.random.key(0), images[:1])
    state = optimizer.init(variables)

    @jax.jit
    def step(variables, state, x, y):
        def loss_fn(variables):
            logits = model.apply(variables, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        updates, state = optimizer.update(jax.grad(loss_fn)(variables), state)
        return optax.apply_updates(variables, updates), state

    rng = np.random.default_rng(1)
    for _ in range(steps):
        batch = rng.choice(len(images), 64)
        variables, state = step(variables, state, images[batch], labels[batch])
    return variables


def classify(path, image):
    """The digit that an image of 8 x 8 pixels from 0 to 1 shows."""
    interpreter = Interpreter(str(path))
    interpreter.allocate_tensors()
    (source,), (target,) = (
        interpreter.get_input_details(),
        interpreter.get_output_details(),
    )
    scale, zero_point = source["quantization"]
    integers = np.clip(np.rint(image / scale) + zero_point, -128, 127)
    interpreter.set_tensor(source["index"], integers.astype(np.int8)[None, ..., None])
    interpreter.invoke()
    return int(interpreter.get_tensor(target["index"])[0].argmax())


def main():
    """Trains, exports, and runs the file on the test digits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--smoke", action="store_true", help="a few steps, as a check")
    args = parser.parse_args()
    steps, shown = (2, 4) if args.smoke else (args.steps, 397)

    digits = load_digits()
    images = np.float32(digits.images[..., None] / 16)
    order = np.random.default_rng(0).permutation(len(images))
    train_set, test_set = order[:1400], order[1400 : 1400 + shown]
    variables = train(images[train_set], digits.target[train_set], steps)
    logits = jax.jit(Classifier().apply)(variables, images[test_set])
    correct = np.mean(logits.argmax(-1) == digits.target[test_set])
    print(f"float32 accuracy {correct:.2%}")

    batches = [images[train_set[i : i + 100]] for i in range(0, 300, 100)]
    ranges = edge.calibrate(Classifier(), variables, batches)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "digits.tflite"
        report = edge.export(Classifier(), variables, ranges, images[:1], path)
        print(report)
        found = [classify(path, images[i, ..., 0]) for i in test_set]
        print(f"int8 accuracy    {np.mean(found == digits.target[test_set]):.2%}")
        print(f"{path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
