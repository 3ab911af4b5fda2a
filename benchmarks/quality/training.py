"""One run: the demo's transformer trained with a preset, and its validation loss."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax

from aqtlite_demo import corpus as corpus_lib
from aqtlite_demo import training
from aqtlite_demo.model import Transformer
from benchmarks.quality.presets import Preset

PARAMS = "params"
"""Collection that the optimizer updates, including learned scales."""

OVERWRITTEN = "_overwrite_with_gradient"
"""Collection to be overwritten with its gradient, as in Flax's `TrainState`."""

_SCALE_RATE = 0.05
"""Learning rate of learned scales, as a fraction of the learning rate."""

VALIDATION_BATCH = 64
"""Number of windows per validation batch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Sizes of a run."""

    steps: int = 1000
    lr: float = 3e-3
    layers: int = 4
    width: int = 192
    heads: int = 4
    batch: int = 8
    length: int = 128
    validation_batches: int = 64
    """Batches of `VALIDATION_BATCH` windows, spread evenly over the held-out text."""


QUICK = Options(
    steps=12, layers=1, width=32, heads=2, batch=4, length=16, validation_batches=2
)
"""Tiny sizes, to check that everything runs."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The results of one run."""

    validation_losses: list[float]
    """Nats per byte for each validation batch; the batches are equal in all runs."""
    training_loss: float
    """Mean training loss over the last tenth of the steps."""
    step_seconds: float
    """Median time per step in seconds."""


def train(
    preset: Preset,
    options: Options,
    corpus: corpus_lib.Corpus,
    seed: int,
    on_step: Callable[[int, float], None],
) -> Result:
    """Train one model and measure it.

    Args:
        preset: preset to train with.
        options: sizes.
        corpus: text to train on.
        seed: seed of the initial weights, the order of the data and the noise; weights
            and order are equal for all presets.
        on_step: function called after each step with the step's number (from 1) and
            loss.
    """
    noise = jax.random.key(seed + 2**31)
    step, loss_fn = programs(preset, options)
    variables, opt_state = initial(preset, options, corpus, seed)
    batches = corpus.batches(options.batch, options.length, seed)
    losses, seconds = [], []
    for number in range(1, options.steps + 1):
        start = time.perf_counter()
        key = jax.random.fold_in(noise, number)
        variables, opt_state, loss = step(variables, opt_state, next(batches), key)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - start)
        on_step(number, losses[-1])
    evaluation = jax.jit(lambda v, batch: loss_fn(v, batch, noise)[0])
    validation = corpus.validation_batches(
        options.validation_batches, VALIDATION_BATCH, options.length
    )
    return Result(
        validation_losses=[float(evaluation(variables, b)) for b in validation],
        training_loss=float(np.mean(losses[-max(1, options.steps // 10) :])),
        step_seconds=statistics.median(seconds[1:] or seconds),
    )


def initial(
    preset: Preset, options: Options, corpus: corpus_lib.Corpus, seed: int
) -> tuple[Any, Any]:
    """The initial variables of a model, and the optimizer state."""
    # Learned scales are initialized from the first batch.
    first = next(corpus.batches(options.batch, options.length, seed))

    @jax.jit
    def init(key: jax.Array, tokens: jax.Array) -> Any:
        return _model(preset, options, key).init(key, tokens)

    variables = init(jax.random.key(seed), first[:, :-1])
    return variables, _optimizer(options).init(variables[PARAMS])


def _optimizer(options: Options) -> optax.GradientTransformation:
    """The demo's optimizer, with a separate, lower rate for learned scales.

    Adam moves every parameter by about the learning rate, but a scale is a tenth of a
    weight or less. The gradient of a scale, a sum over many elements, would also
    dominate the norm for clipping. A factor (`LearnedClipping`) is about 1 and keeps
    the full rate.
    """

    def adam(lr: float) -> optax.GradientTransformation:
        return optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(lr))

    transforms = {
        "weights": training.optimizer(options.lr, options.steps),
        "scales": adam(_SCALE_RATE * options.lr),
        "factors": adam(options.lr),
    }
    return optax.multi_transform(transforms, _kinds)


def _kinds(params: Any) -> Any:
    def kind(path: tuple[Any, ...], leaf: Any) -> str:
        del leaf
        names = [str(getattr(key, "key", key)) for key in path]
        if not any(name.startswith("aqt_") for name in names):
            return "weights"
        return "factors" if names[-1] == "factor" else "scales"

    return jax.tree_util.tree_map_with_path(kind, params)


def programs(
    preset: Preset, options: Options
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The compiled training step, and the loss.

    The step is ``(variables, opt_state, batch, key) -> (variables, opt_state, loss)``.
    `PARAMS` are updated by the optimizer, `OVERWRITTEN` is replaced by its gradient,
    and all other collections (statistics) are updated by `apply`.
    """
    tx = _optimizer(options)

    def loss_fn(
        variables: Mapping[str, Any],
        batch: jax.Array,
        key: jax.Array,
        mutable: tuple[str, ...] = (),
    ) -> tuple[jax.Array, Mapping[str, Any]]:
        logits, state = _model(preset, options, key).apply(
            variables, batch[:, :-1], rngs={PARAMS: key}, mutable=list(mutable)
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
        return losses.mean(), state

    def step(variables: Any, opt_state: Any, batch: Any, key: jax.Array) -> Any:
        learned = {k: v for k, v in variables.items() if k in (PARAMS, OVERWRITTEN)}
        others = {k: v for k, v in variables.items() if k not in learned}

        def loss(learned: Any) -> Any:
            return loss_fn({**learned, **others}, batch, key, tuple(others))

        (value, state), gradients = jax.value_and_grad(loss, has_aux=True)(learned)
        updates, opt_state = tx.update(gradients[PARAMS], opt_state, learned[PARAMS])
        params = optax.apply_updates(learned[PARAMS], updates)
        return {**gradients, **others, **state, PARAMS: params}, opt_state, value

    return jax.jit(step, donate_argnums=(0, 1)), loss_fn


def _model(preset: Preset, options: Options, key: jax.Array) -> Transformer:
    return Transformer(
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        length=options.length,
        dot_general=preset.dot_general(key),
    )
