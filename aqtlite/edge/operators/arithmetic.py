"""Operators of two values, element by element, that broadcast as NumPy does."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from aqtlite.edge.arithmetic import binary, unary
from aqtlite.edge.arithmetic.kernels import Kernels
from aqtlite.edge.grid import Grid
from aqtlite.edge.operators import activation as activations
from aqtlite.edge.operators.activation import Activation
from aqtlite.edge.operators.base import Moving, Operator


@dataclasses.dataclass(frozen=True)
class Add(Operator):
    """``activation(x + y)``."""

    activation: Activation = "none"

    name = "add"

    def compute(self, *inputs: jax.Array) -> Any:
        x, y = inputs
        return activations.apply(x + y, self.activation)

    def simulate(
        self,
        inputs: Sequence[Any],
        grids: Sequence[Any],
        output: Grid,
        kernels: Kernels,
    ) -> jax.Array:
        (x, y), (x_grid, y_grid) = inputs, grids
        clamp = activations.limits(self.activation)
        return binary.add(x, x_grid, y, y_grid, output, clamp, kernels)


@dataclasses.dataclass(frozen=True)
class Subtract(Operator):
    """``activation(x - y)``."""

    activation: Activation = "none"

    name = "sub"

    def compute(self, *inputs: jax.Array) -> Any:
        x, y = inputs
        return activations.apply(x - y, self.activation)

    def simulate(
        self,
        inputs: Sequence[Any],
        grids: Sequence[Any],
        output: Grid,
        kernels: Kernels,
    ) -> jax.Array:
        (x, y), (x_grid, y_grid) = inputs, grids
        clamp = activations.limits(self.activation)
        return binary.sub(x, x_grid, y, y_grid, output, clamp, kernels)


@dataclasses.dataclass(frozen=True)
class Multiply(Operator):
    """``activation(x * y)``."""

    activation: Activation = "none"

    name = "mul"

    def compute(self, *inputs: jax.Array) -> Any:
        x, y = inputs
        return activations.apply(x * y, self.activation)

    def simulate(
        self,
        inputs: Sequence[Any],
        grids: Sequence[Any],
        output: Grid,
        kernels: Kernels,
    ) -> jax.Array:
        (x, y), (x_grid, y_grid) = inputs, grids
        clamp = activations.limits(self.activation)
        return binary.mul(x, x_grid, y, y_grid, output, clamp, kernels)


@dataclasses.dataclass(frozen=True)
class Divide(Operator):
    """``x / y`` of known values: quotients of integers are wrong in LiteRT."""

    name = "div"

    def compute(self, *inputs: jax.Array) -> Any:
        x, y = inputs
        return x / y

    def simulate(
        self,
        inputs: Sequence[Any],
        grids: Sequence[Any],
        output: Grid,
        kernels: Kernels,
    ) -> jax.Array:
        raise NotImplementedError("a quotient is known")


@dataclasses.dataclass(frozen=True)
class ToFloat(Operator):
    """Known integers or booleans as floats."""

    name = "cast"

    def compute(self, *inputs: jax.Array) -> Any:
        (x,) = inputs
        return jnp.asarray(x, jnp.float32)

    def simulate(
        self,
        inputs: Sequence[Any],
        grids: Sequence[Any],
        output: Grid,
        kernels: Kernels,
    ) -> jax.Array:
        raise NotImplementedError("the integers are known")


@dataclasses.dataclass(frozen=True)
class Maximum(Moving):
    """The larger of two values."""

    name = "maximum"

    def compute(self, *inputs: jax.Array) -> Any:
        return jnp.maximum(*inputs)


@dataclasses.dataclass(frozen=True)
class Minimum(Moving):
    """The smaller of two values."""

    name = "minimum"

    def compute(self, *inputs: jax.Array) -> Any:
        return jnp.minimum(*inputs)


@dataclasses.dataclass(frozen=True)
class Clip(Operator):
    """Values, clipped to a range that one of LiteRT's activations has."""

    low: float = -math.inf
    high: float = math.inf

    name = "clip"

    def compute(self, *inputs: jax.Array) -> Any:
        (x,) = inputs
        return activations.clip(x, self.low, self.high)

    def simulate(
        self,
        inputs: Sequence[Any],
        grids: Sequence[Any],
        output: Grid,
        kernels: Kernels,
    ) -> jax.Array:
        table = unary.relu(grids[0], output, self.low, self.high)
        return unary.lookup(table, inputs[0])


FUSING = (Add, Subtract, Multiply)
"""Operators with an activation."""
