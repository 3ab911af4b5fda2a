"""Training in float32, of Linen and of NNX models."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from flax import nnx

BATCH = 64


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained model for inference."""

    model: nn.Module | nnx.Module
    variables: Any

    def __call__(self, x: Any) -> jax.Array:
        """The logits."""
        if isinstance(self.model, nn.Module):
            return self.model.apply(self.variables, x)
        return nnx.merge(nnx.graphdef(self.model), self.variables)(x)

    @property
    def size(self) -> int:
        """Bytes of the variables."""
        return sum(x.nbytes for x in jax.tree.leaves(self.variables))


def train(kind: type, images: Any, labels: Any, epochs: int, seed: int) -> Trained:
    """Trains a model of a class."""
    fit = functools.partial(_fit, images, labels, epochs, seed)
    if issubclass(kind, nnx.Module):
        model = kind(nnx.Rngs(seed))
        graphdef, state = nnx.split(model)
        state, _ = fit(lambda p, _, x: (nnx.merge(graphdef, p)(x), {}), state, {})
        return Trained(nnx.merge(graphdef, state), state)
    variables = jax.jit(kind().init)(jax.random.key(seed), images[:1])
    training = kind(train=True)

    def apply(params: Any, others: Any, x: Any) -> tuple[jax.Array, Any]:
        return training.apply({"params": params, **others}, x, mutable=list(others))

    others = {name: x for name, x in variables.items() if name != "params"}
    params, others = fit(apply, variables["params"], others)
    return Trained(kind(), {"params": params, **others})


def _fit(
    images: Any,
    labels: Any,
    epochs: int,
    seed: int,
    apply: Callable[[Any, Any, Any], tuple[jax.Array, Any]],
    params: Any,
    others: Any,
) -> tuple[Any, Any]:
    """The trained parameters, and the other variables of a model.

    Args:
        images: training images.
        labels: training labels.
        epochs: number of epochs.
        seed: seed of the order of images.
        apply: function from parameters, other variables and images to logits and
            updated other variables.
        params: initial parameters.
        others: initial other variables.
    """
    steps = len(images) // BATCH * epochs
    optimizer = optax.adam(
        optax.warmup_cosine_decay_schedule(0, 3e-3, steps // 10, steps)
    )

    def loss(params: Any, others: Any, x: Any, y: Any) -> Any:
        logits, others = apply(params, others, x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return losses.mean(), others

    @jax.jit
    def step(params: Any, others: Any, state: Any, x: Any, y: Any) -> Any:
        gradients, others = jax.grad(loss, has_aux=True)(params, others, x, y)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), others, state

    state = optimizer.init(params)
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = rng.permutation(len(images))
        for start in range(0, len(images) - BATCH + 1, BATCH):
            at = order[start : start + BATCH]
            params, others, state = step(params, others, state, images[at], labels[at])
    return params, others
