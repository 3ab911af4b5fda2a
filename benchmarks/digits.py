"""Test accuracy of a small CNN with BatchNorm, in float32, in 8 bits and in 3 bits.

    python -m benchmarks.digits

Trains on scikit-learn's handwritten digits (8 x 8 pixels), with 8 bits forward and
backward, converts with and without folding the BatchNorms, and reports the test
accuracy of each model. The folded float model is also converted to weights of 3 bits,
to nearest and by GPTQ, with biases as trained and corrected.
"""

import argparse
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich

from aqtlite import calibration, config
from aqtlite.flax import (
    AqtConvGeneralDilated,
    AqtDotGeneral,
    calibrate_in_float,
    convert,
    correct_biases,
    fold_batch_norm,
)

BATCH = 128
LAYERS = {f"BatchNorm_{i}": f"Conv_{i}" for i in range(3)}


class Cnn(nn.Module):
    """Three convolutions, one of them depthwise, each with a BatchNorm."""

    cfg: config.DotGeneral | None
    features: int = 32

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        conv = functools.partial(
            nn.Conv, conv_general_dilated=AqtConvGeneralDilated(self.cfg)
        )
        n = self.features
        layers = (
            conv(n, (3, 3)),
            conv(n, (3, 3), feature_group_count=n),
            conv(2 * n, (3, 3), strides=2),
        )
        for layer in layers:
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(layer(x))
            x = nn.relu(x)
        x = x.mean((1, 2))
        return nn.Dense(10, dot_general=AqtDotGeneral(self.cfg))(x)


def load() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Training images and labels, and test images and labels: every fourth."""
    from sklearn import datasets  # Here, because it imports SciPy, which is slow.

    digits = datasets.load_digits()
    images = (digits.images[..., None] / 8 - 1).astype(np.float32)
    is_test = np.arange(len(images)) % 4 == 0
    return (
        (images[~is_test], digits.target[~is_test]),
        (images[is_test], digits.target[is_test]),
    )


def train(model: nn.Module, images: Any, labels: Any, epochs: int, seed: int) -> Any:
    """The trained variables."""
    steps = len(images) // BATCH * epochs
    optimizer = optax.adam(optax.cosine_decay_schedule(5e-3, steps))
    init = jax.jit(functools.partial(model.init, train=False))
    variables = init(jax.random.key(seed), images[:1])
    state = optimizer.init(variables["params"])

    def loss(params: Any, statistics: Any, x: Any, y: Any) -> Any:
        logits, changed = model.apply(
            {"params": params, "batch_stats": statistics},
            x,
            train=True,
            mutable=["batch_stats"],
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return losses.mean(), changed["batch_stats"]

    @jax.jit
    def step(params: Any, statistics: Any, state: Any, x: Any, y: Any) -> Any:
        gradient = jax.grad(loss, has_aux=True)
        gradients, statistics = gradient(params, statistics, x, y)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), statistics, state

    params, statistics = variables["params"], variables["batch_stats"]
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = rng.permutation(len(images))
        for start in range(0, len(images) - BATCH + 1, BATCH):
            at = order[start : start + BATCH]
            params, statistics, state = step(
                params, statistics, state, images[at], labels[at]
            )
    return {"params": params, "batch_stats": statistics}


def accuracy(model: nn.Module, variables: Any, images: Any, labels: Any) -> float:
    """The share of correctly classified images."""
    logits = jax.jit(functools.partial(model.apply, train=False))(variables, images)
    return float((jnp.argmax(logits, -1) == labels).mean())


def in_three_bits(variables: Any, batch: Any, test: Any) -> dict[str, float]:
    """The accuracy of a trained float model whose weights are rounded to 3 bits.

    Args:
        variables: those of the float model.
        batch: images that statistics are gathered from.
        test: images and labels.
    """
    variables = fold_batch_norm(variables, LAYERS)
    nearest = config.update(
        config.weight_only(3), {"fwd.rhs.calibration": calibration.MseSearch()}
    )
    found = {}
    for name, rounding in (("nearest", None), ("GPTQ", config.Gptq())):
        model = Cnn(config.update(nearest, {"fwd.rhs.rounding": rounding}))
        given = variables
        if rounding is not None:
            given = calibrate_in_float(model, variables, [batch], train=False)
        serving = convert(model, given, batch, train=False)
        corrected = correct_biases(model, variables, serving, [batch], train=False)
        found[f"3 bits, {name}"] = accuracy(model, serving, *test)
        found[f"3 bits, {name}, biases corrected"] = accuracy(model, corrected, *test)
    return found


def main() -> None:
    """Trains and compares."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    training, test = load()
    cfg = config.fully_quantized(fwd_bits=8, bwd_bits=8)
    for seed in options.seeds:
        found = {}
        for name, one in (("float32", None), ("int8", cfg)):
            model = Cnn(one)
            variables = train(model, *training, options.epochs, seed)
            found[name] = accuracy(model, variables, *test)
            if one is None:
                found |= in_three_bits(variables, training[0][:512], test)
        serve = functools.partial(convert, model, train=False)
        serving = serve(variables, test[0][:1])
        folded = serve(fold_batch_norm(variables, LAYERS), test[0][:1])
        found["int8, converted"] = accuracy(model, serving, *test)
        found["int8, folded and converted"] = accuracy(model, folded, *test)
        shown = ", ".join(f"{name} {one:.2%}" for name, one in found.items())
        rich.print(f"seed {seed}: {shown}")


if __name__ == "__main__":
    main()
