"""Training steps compiled for devices that need not be there."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from aqtlite.reporting import collectives
from benchmarks.collectives.strategies import Strategy
from benchmarks.harness.contestants import Contestant
from benchmarks.pods import model


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What is known of a compiled training step."""

    collectives: Sequence[collectives.Collective]
    memory: int
    """Bytes on a chip: weights, batch and everything temporary."""
    temporary: int
    """Bytes of temporary memory on a chip."""
    seconds: float
    """Processor time of tracing, lowering and compiling."""


def compile_step(
    contestant: Contestant,
    strategy: Strategy,
    sizes: model.Sizes,
    devices: Sequence[jax.Device],
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """Compiles a step of gradient descent for devices, which need not be there.

    Args:
        contestant: what contracts activations and weights.
        strategy: how they are divided.
        sizes: sizes of the model.
        devices: as many as the mesh of the strategy has.
        options: options of XLA's compiler.
    """
    mesh = strategy.device_mesh(devices)
    shardings = {
        name: NamedSharding(mesh, P(None, *spec))
        for name, spec in strategy.weights.items()
    }

    def cut(x: jax.Array, place: str) -> jax.Array:
        spec = strategy.activations[place]
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    step = model.training_step(contestant, sizes, jax.checkpoint, cut)
    weights = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=shardings[name])
        for name, shape in sizes.weights().items()
    }
    x = jax.ShapeDtypeStruct(
        (len(devices), sizes.length, sizes.width),
        jnp.bfloat16,
        sharding=NamedSharding(mesh, strategy.input),
    )
    out = shardings, NamedSharding(mesh, P())
    start = time.process_time()
    lowered = jax.jit(step, donate_argnums=0, out_shardings=out).lower(weights, x, x)
    compiled = lowered.compile(compiler_options=options and dict(options))
    seconds = time.process_time() - start
    held: Any = compiled.memory_analysis()
    return Compiled(
        collectives.of_text(compiled.as_text()),
        held.argument_size_in_bytes
        + held.output_size_in_bytes
        - held.alias_size_in_bytes
        + held.temp_size_in_bytes,
        held.temp_size_in_bytes,
        seconds,
    )
