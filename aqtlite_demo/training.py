"""Training of several models on the same data, alternating at every step."""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
import optax

from aqtlite_demo.model import Transformer


class Snapshot(Protocol):
    """Keeps the state of training, so that another process can resume it."""

    def restore(self, runs: Mapping[str, "Trained"], opt_states: dict[str, Any]) -> int:
        """Restores the kept state, if any; returns its step, or 0."""

    def keep(
        self,
        step: int,
        runs: Mapping[str, "Trained"],
        opt_states: Mapping[str, Any],
        *,
        is_last: bool,
    ) -> None:
        """Receives the state after a step, and may keep it."""


CURVE_POINTS = 6
"""Number of points of the validation curve, each a mean over all validation batches."""


@dataclasses.dataclass
class Trained:
    """A trained model, with its losses and times."""

    model: Transformer
    variables: Any
    losses: list[float] = dataclasses.field(default_factory=list)
    """Training loss of each step."""
    curve: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    """Pairs of step and validation loss."""
    seconds: list[float] = dataclasses.field(default_factory=list)
    """Time of each step, in seconds."""

    @property
    def validation_loss(self) -> float:
        """The last validation loss."""
        return self.curve[-1][1]

    @property
    def step_seconds(self) -> float:
        """Median time per step, without the first step, which compiles."""
        return statistics.median(self.seconds[1:] or self.seconds)


def optimizer(lr: float, steps: int) -> optax.GradientTransformation:
    """AdamW with clipped gradients, a short warmup and a cosine decay to zero."""
    warmup = max(1, steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(0.0, lr, warmup, max(steps, 2))
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01)
    )


def loss_fn(model: Transformer, variables: Any, batch: jax.Array) -> jax.Array:
    """Mean cross-entropy, in nats per token, of predicting each row's next token."""
    logits = model.apply(variables, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def make_step(model: Transformer, tx: optax.GradientTransformation) -> Callable:
    """A compiled training step: ``(variables, opt_state, batch) -> (..., loss)``."""

    def step(variables, opt_state, batch):
        loss, grads = jax.value_and_grad(lambda v: loss_fn(model, v, batch))(variables)
        updates, opt_state = tx.update(grads, opt_state, variables)
        return optax.apply_updates(variables, updates), opt_state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def evaluate(evaluation: Callable, variables: Any, batches: Sequence) -> float:
    """Mean of a compiled loss over batches."""
    return float(np.mean([evaluation(variables, batch) for batch in batches]))


def train_side_by_side(
    models: Mapping[str, Transformer],
    batches: Iterator[np.ndarray],
    validation: Sequence[np.ndarray],
    *,
    steps: int,
    lr: float,
    seed: int,
    on_step: Callable[[int, Mapping[str, Trained]], None],
    snapshot: Snapshot | None = None,
) -> dict[str, Trained]:
    """Train every model from the same key on the same batches.

    The models take turns at every step, in alternating order, so that their times stay
    comparable even if the machine slows down.

    Args:
        models: models by name.
        batches: training batches, int32, ``(batch, length + 1)``.
        validation: validation batches of the same format.
        steps: optimizer steps per model.
        lr: peak learning rate.
        seed: seed of the initial weights.
        on_step: function called after each step with the step's number (from 1) and the
            models.
        snapshot: keeps the state to resume from; None keeps none.

    Returns:
        The trained models by name.
    """
    tx = optimizer(lr, steps)
    runs, opt_states, step_fns, evaluations = {}, {}, {}, {}
    for name, model in models.items():
        variables = jax.jit(model.init)(jax.random.key(seed), validation[0][:, :-1])
        runs[name] = Trained(model, variables)
        opt_states[name] = tx.init(variables)
        step_fns[name] = make_step(model, tx)
        evaluations[name] = jax.jit(lambda v, b, model=model: loss_fn(model, v, b))

    curve_steps = {round(steps * i / CURVE_POINTS) for i in range(1, CURVE_POINTS + 1)}
    done = 0
    if snapshot is not None:
        done = snapshot.restore(runs, opt_states)
    for step, batch in enumerate(itertools.islice(batches, steps), start=1):
        if step <= done:
            continue
        for name in list(runs) if step % 2 else reversed(runs):
            run = runs[name]
            start = time.perf_counter()
            run.variables, opt_states[name], loss = step_fns[name](
                run.variables, opt_states[name], batch
            )
            loss = float(loss)
            jax.block_until_ready(run.variables)
            run.seconds.append(time.perf_counter() - start)
            run.losses.append(loss)
        if step in curve_steps:
            for name, run in runs.items():
                loss = evaluate(evaluations[name], run.variables, validation)
                run.curve.append((step, loss))
        if snapshot is not None:
            snapshot.keep(step, runs, opt_states, is_last=step == steps)
        on_step(step, runs)
    return runs
