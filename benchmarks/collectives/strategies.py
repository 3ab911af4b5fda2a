"""Sharding strategies: the mesh, and the partition spec of every array."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import PartitionSpec as P

DEVICES = 8
TENSOR_PARALLEL = {"up": P(None, "model"), "down": P("model", None)}


@dataclasses.dataclass(frozen=True)
class Strategy:
    """Partition specs of a training step, on a mesh of axes "data" and "model"."""

    name: str
    mesh: tuple[int, int]
    input: P
    weights: Mapping[str, P]
    activations: Mapping[str, P] = dataclasses.field(default_factory=dict)
    """Sharding constraints in the model, by the names of its activations."""

    def device_mesh(
        self, devices: Sequence[jax.Device] | None = None
    ) -> jax.sharding.Mesh:
        """Mesh of devices; by default, of simulated CPU devices."""
        auto = (jax.sharding.AxisType.Auto,) * 2
        if devices is None:
            devices = jax.devices("cpu")[: math.prod(self.mesh)]
        return jax.make_mesh(self.mesh, ("data", "model"), auto, devices=devices)


STRATEGIES = (
    Strategy("data parallel 8", (8, 1), P("data"), {"up": P(), "down": P()}),
    Strategy("FSDP 8", (8, 1), P("data"), {"up": P("data"), "down": P("data")}),
    Strategy("tensor parallel 2 x 4", (2, 4), P("data"), TENSOR_PARALLEL),
    Strategy(
        "FSDP x TP 2 x 4",
        (2, 4),
        P("data"),
        {"up": P("data", "model"), "down": P("model", "data")},
        {"input": P("data"), "hidden": P("data", "model"), "output": P("data")},
    ),
    Strategy(
        "sequence parallel 2 x 4",
        (2, 4),
        P("data", "model"),
        TENSOR_PARALLEL,
        {
            "input": P("data", "model"),
            "hidden": P("data", None, "model"),
            "output": P("data", "model"),
        },
    ),
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the model and its batch."""

    width: int = 512
    hidden: int = 2048
    sequences: int = 8
    length: int = 64
    rows: int = 256

    def input_shape(self, strategy: Strategy) -> tuple[int, ...]:
        """Shape of the input: 3-D if sequences are sharded, otherwise 2-D."""
        if len(strategy.input) > 1:
            return self.sequences, self.length, self.width
        return self.rows, self.width
