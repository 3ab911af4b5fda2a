"""Elementwise operators of two values, with NumPy's broadcasting; conversion, clip."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from aqtlite.edge.arithmetic import binary, unary
from aqtlite.edge.arithmetic.kernels import Kernels
from aqtlite.edge.grid import Grid, Quantized
from aqtlite.edge.operators.base import Activated, Moving, Operator, clip


class Add(Activated):
    """``activation(x + y)``."""

    name = "add"

    def before_activation(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return x + y

    def simulate(
        self, output: Grid, kernels: Kernels, x: Quantized, y: Quantized
    ) -> jax.Array:
        return binary.add(x, y, output, self.clamp, kernels)


class Subtract(Activated):
    """``activation(x - y)``."""

    name = "sub"

    def before_activation(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return x - y

    def simulate(
        self, output: Grid, kernels: Kernels, x: Quantized, y: Quantized
    ) -> jax.Array:
        return binary.sub(x, y, output, self.clamp, kernels)


class Multiply(Activated):
    """``activation(x * y)``."""

    name = "mul"

    def before_activation(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return x * y

    def simulate(
        self, output: Grid, kernels: Kernels, x: Quantized, y: Quantized
    ) -> jax.Array:
        return binary.mul(x, y, output, self.clamp, kernels)


@dataclasses.dataclass(frozen=True)
class Divide(Operator):
    """``x / y`` of known values only: LiteRT's quotients of integers are wrong."""

    name = "div"

    def compute(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return x / y


@dataclasses.dataclass(frozen=True)
class ToFloat(Operator):
    """Conversion of known integers or booleans to floats."""

    name = "cast"

    def compute(self, x: jax.Array) -> jax.Array:
        return jnp.asarray(x, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Maximum(Moving):
    """The larger of two values."""

    name = "maximum"

    def compute(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.maximum(x, y)


@dataclasses.dataclass(frozen=True)
class Minimum(Moving):
    """The smaller of two values."""

    name = "minimum"

    def compute(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.minimum(x, y)


@dataclasses.dataclass(frozen=True)
class Clip(Operator):
    """A clip to the range of one of LiteRT's activations."""

    low: float = -math.inf
    high: float = math.inf

    name = "clip"

    def compute(self, x: jax.Array) -> jax.Array:
        return clip(x, self.low, self.high)

    def simulate(self, output: Grid, kernels: Kernels, x: Quantized) -> jax.Array:
        return unary.lookup(unary.relu(x.grid, output, self.low, self.high), x.qvalue)


FUSING = (Add, Subtract, Multiply)
"""Operators of two values that can have a fused activation."""
