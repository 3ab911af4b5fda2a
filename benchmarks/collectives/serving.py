"""Serving of the MLP with tensor-parallel weights."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from aqtlite.flax import AqtDotGeneral, convert
from aqtlite.reporting import collectives
from benchmarks.collectives.strategies import STRATEGIES, TENSOR_PARALLEL, Sizes
from benchmarks.collectives.training import difference
from benchmarks.harness import contestants
from benchmarks.harness.contestants import AQTLITE, FLOAT32


class Mlp(nn.Module):
    """Two layers whose kernels carry partitioning metadata."""

    dot_general: Any
    sizes: Sizes

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies both layers."""
        widths = {"up": self.sizes.hidden, "down": self.sizes.width}
        for name, width in widths.items():
            spec = tuple(TENSOR_PARALLEL[name])
            x = nn.Dense(
                width,
                use_bias=False,
                name=name,
                dot_general=self.dot_general,
                kernel_init=nn.with_partitioning(
                    nn.initializers.lecun_normal(), (*spec, None)[:2]
                ),
            )(x)
            x = nn.relu(x) if name == "up" else x
        return x


SERVING_ROWS = 8


def serve(
    dot_general: Any, freeze: Callable[..., Any], sizes: Sizes
) -> tuple[list[collectives.Collective], float]:
    """Collectives for `SERVING_ROWS` rows, and the difference from one device."""
    strategy = STRATEGIES[2]
    mesh = strategy.device_mesh()
    model = Mlp(dot_general, sizes)
    x = jnp.asarray(
        np.random.default_rng(1).standard_normal(
            (SERVING_ROWS, sizes.width), np.float32
        )
    )
    variables = freeze(model, model.init(jax.random.key(0), x), x)
    alone = jax.jit(model.apply)(variables, x)
    sharded = jax.device_put(
        variables, nn.get_sharding(jax.eval_shape(lambda: variables), mesh)
    )
    rows = NamedSharding(mesh, P("data"))
    apply = jax.jit(model.apply, out_shardings=rows)
    compiled = apply.lower(sharded, jax.device_put(x, rows)).compile()
    found = collectives.of_text(compiled.as_text())
    return found, difference(compiled(sharded, x), alone)


def served() -> dict[str, tuple[Any, Callable[..., Any]]]:
    """``dot_general`` and weight-freezing function of each contestant."""
    return {
        FLOAT32: (jax.lax.dot_general, lambda model, variables, x: variables),
        AQTLITE: (AqtDotGeneral(contestants.aqtlite_config()), convert),
    }
