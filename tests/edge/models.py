"""Models for the tests of full-integer programs, and their files in the interpreter."""

import pathlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from ai_edge_litert import interpreter
from flax import nnx

from aqtlite import edge
from aqtlite.edge.arithmetic import rescaling
from tests import common

RESOLVERS = {
    "xnnpack": interpreter.OpResolverType.AUTO,
    "builtin": interpreter.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
}


class ConvNet(nn.Module):
    """Convolutions, each with a batch normalization, and pooling."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (4, 8):
            x = nn.Conv(features, (3, 3))(x)
            x = nn.BatchNorm(use_running_average=True)(x)
            x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        x = nn.relu(nn.Dense(16)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(x)


class Depthwise(nn.Module):
    """Blocks as in MobileNet: depthwise and pointwise convolutions, and a residual."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(8, (3, 3), strides=2, use_bias=False)(x)
        x = nn.relu6(nn.BatchNorm(use_running_average=True)(x))
        for stride in (1, 2):
            y = nn.Conv(8, (3, 3), stride, feature_group_count=8, use_bias=False)(x)
            y = nn.relu6(nn.BatchNorm(use_running_average=True)(y))
            y = nn.BatchNorm(use_running_average=True)(nn.Conv(8, (1, 1))(y))
            x = x + y if x.shape == y.shape else y
        return nn.softmax(nn.Dense(10)(x.mean((1, 2))))


class Encoder(nn.Module):
    """A transformer encoder of one block, of tokens or of vectors."""

    vocabulary: int = 0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocabulary, 16)(x) if self.vocabulary else nn.Dense(16)(x)
        x = x + self.param("positions", nn.initializers.normal(), (1, x.shape[1], 16))
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(2)(y, y)
        y = nn.gelu(nn.Dense(32)(nn.LayerNorm()(x)))
        x = nn.LayerNorm()(x + nn.Dense(16)(y))
        return nn.Dense(10)(x.mean(1))


class Mlp(nnx.Module):
    """A multilayer perceptron of NNX."""

    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(8, 16, rngs=rngs)
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(nnx.silu(self.hidden(x)))


def normal(shape: tuple[int, ...], seed: int = 1) -> jax.Array:
    """Random inputs."""
    return common.normal(shape, seed)


def trained(model: nn.Module, x: Any) -> Any:
    """Variables of which no two channels have the same statistics."""
    rng = np.random.default_rng(1)

    def changed(leaf: jax.Array) -> np.ndarray:
        factors = rng.uniform(0.5, 1.5, leaf.shape).astype(np.float32)
        return (np.asarray(leaf) + np.float32(0.1)) * factors

    return jax.tree.map(changed, common.quick_jit(model.init)(jax.random.key(0), x))


def run(path: pathlib.Path, *inputs: Any, kernels: str = "xnnpack") -> list[np.ndarray]:
    """The outputs of a file in the interpreter."""
    model = interpreter.Interpreter(
        str(path), experimental_op_resolver_type=RESOLVERS[kernels]
    )
    signature = model.get_signature_list()["serving_default"]
    runner = model.get_signature_runner()
    names = signature["inputs"]
    found = runner(**dict(zip(names, map(np.asarray, inputs), strict=True)))
    return [np.array(found[name]) for name in sorted(found, key=_number)]


def _number(name: str) -> int:
    return int(name.removeprefix("output").removeprefix("_") or 0)


def integers(simulation: edge.Simulation, x: Any) -> np.ndarray:
    """The integers of the only input."""
    (number,) = simulation.deployed.program.graph.inputs
    grid = simulation.deployed.grids[number]
    return np.asarray(rescaling.quantize(jnp.asarray(x), grid, simulation.kernels))


def assert_simulated(
    path: pathlib.Path,
    model: Any,
    variables: Any,
    x: Any,
    rules: Any = (),
    kernels: str = "xnnpack",
) -> tuple[edge.Report, list[np.ndarray]]:
    """Asserts that a file computes what its simulation does, bit for bit."""
    ranges = edge.calibrate(model, variables, [x], rules)
    report = edge.export(model, variables, ranges, x, path, rules)
    simulation = edge.simulate(model, variables, ranges, x, rules, kernels=kernels)
    # Beyond what was calibrated, too.
    wide = x if jnp.issubdtype(x.dtype, jnp.integer) else 1.2 * x[::-1]
    given = wide if wide.dtype == jnp.int32 else integers(simulation, wide)
    found = run(path, given, kernels=kernels)
    predicted = jax.tree.leaves(jax.jit(simulation)(wide))
    assert len(found) == len(predicted)
    for one, other in zip(found, predicted, strict=True):
        np.testing.assert_array_equal(one, other)
    return report, found
