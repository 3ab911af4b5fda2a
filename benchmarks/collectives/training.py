"""Training step of a two-layer MLP under a sharding strategy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from aqtlite.reporting import collectives
from benchmarks.collectives.strategies import Sizes, Strategy
from benchmarks.harness.contestants import (
    AQTLITE,
    AQTP,
    FLOAT32,
    QWIX_STOCHASTIC,
    Contestant,
)

NAMES = (FLOAT32, AQTLITE, AQTP, QWIX_STOCHASTIC)


def training_step(
    contestant: Contestant, strategy: Strategy, mesh: jax.sharding.Mesh | None
) -> Callable[..., Any]:
    """One step of gradient descent; ``mesh=None`` runs on a single device."""

    def constrained(x: jax.Array, name: str) -> jax.Array:
        if mesh is None or name not in strategy.activations:
            return x
        sharding = NamedSharding(mesh, strategy.activations[name])
        return jax.lax.with_sharding_constraint(x, sharding)

    def loss(weights: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        dims = (((x.ndim - 1,), (0,)), ((), ()))
        x = constrained(x, "input")
        hidden = contestant.dot_general(x, weights["up"], dims)
        hidden = constrained(jax.nn.relu(constrained(hidden, "hidden")), "hidden")
        out = contestant.dot_general(hidden, weights["down"], dims)
        return jnp.square(constrained(out, "output") - y).mean()

    def step(weights: Any, x: jax.Array, y: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, x, y)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    return step


def train(
    contestant: Contestant, strategy: Strategy, sizes: Sizes
) -> tuple[list[collectives.Collective], Callable[[], float]]:
    """Collectives of a step, and a function that compares it with one device.

    The function returns the largest `difference` of the updated weights.
    """
    rng = np.random.default_rng(0)
    shape = sizes.input_shape(strategy)
    x, y = (rng.standard_normal(shape, np.float32) for _ in "xy")
    weights = {
        "up": rng.standard_normal((sizes.width, sizes.hidden), np.float32),
        "down": rng.standard_normal((sizes.hidden, sizes.width), np.float32),
    }
    weights = {k: w / np.float32(len(w) ** 0.5) for k, w in weights.items()}
    mesh = strategy.device_mesh()
    by_weight = {k: NamedSharding(mesh, spec) for k, spec in strategy.weights.items()}
    by_input = NamedSharding(mesh, strategy.input)
    shardings = by_weight, by_input, by_input
    step = jax.jit(
        training_step(contestant, strategy, mesh),
        in_shardings=shardings,
        out_shardings=(by_weight, NamedSharding(mesh, P())),
    )
    compiled = step.lower(weights, x, y).compile()

    def from_one_device() -> float:
        alone, _ = jax.jit(training_step(contestant, strategy, None))(weights, x, y)
        got, _ = compiled(*jax.device_put((weights, x, y), shardings))
        return difference(got, alone)

    return collectives.of_text(compiled.as_text()), from_one_device


def difference(got: Any, wanted: Any) -> float:
    """Largest absolute difference, relative to the largest magnitude of `wanted`."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    return max(
        float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max())
        for a, b in pairs
    )
