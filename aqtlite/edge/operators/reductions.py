"""Reductions over axes, and pooling over windows."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite.edge.arithmetic import pooling, reductions
from aqtlite.edge.arithmetic.kernels import Kernels
from aqtlite.edge.grid import Grid
from aqtlite.edge.operators.base import Moving, Operator


@dataclasses.dataclass(frozen=True)
class Mean(Operator):
    """The mean over axes."""

    axes: tuple[int, ...]

    name = "mean"

    @property
    def is_compound(self) -> bool:
        return True

    def compute(self, *inputs: jax.Array) -> Any:
        (x,) = inputs
        return jnp.mean(x, axis=self.axes)

    def simulate(
        self,
        inputs: Sequence[Any],
        grids: Sequence[Any],
        output: Grid,
        kernels: Kernels,
    ) -> jax.Array:
        (x,), (grid,) = inputs, grids
        return reductions.mean(x, grid, output, self.axes, kernels=kernels)


@dataclasses.dataclass(frozen=True)
class Sum(Operator):
    """The sum over axes."""

    axes: tuple[int, ...]

    name = "sum"

    def compute(self, *inputs: jax.Array) -> Any:
        (x,) = inputs
        return jnp.sum(x, axis=self.axes)

    def simulate(
        self,
        inputs: Sequence[Any],
        grids: Sequence[Any],
        output: Grid,
        kernels: Kernels,
    ) -> jax.Array:
        return reductions.total(inputs[0], grids[0], output, self.axes)


@dataclasses.dataclass(frozen=True)
class ReduceMax(Moving):
    """The largest value over axes."""

    axes: tuple[int, ...]

    name = "reduce_max"

    def compute(self, *inputs: jax.Array) -> Any:
        (x,) = inputs
        return jnp.max(x, axis=self.axes)


@dataclasses.dataclass(frozen=True)
class ReduceMin(Moving):
    """The smallest value over axes."""

    axes: tuple[int, ...]

    name = "reduce_min"

    def compute(self, *inputs: jax.Array) -> Any:
        (x,) = inputs
        return jnp.min(x, axis=self.axes)


@dataclasses.dataclass(frozen=True)
class AveragePool2D(Operator):
    """The mean of windows of [N, H, W, C], without padding.

    Runtimes average the integers, and leave their grid.
    """

    window: tuple[int, int]
    strides: tuple[int, int]

    name = "average_pool_2d"

    @property
    def moves_values(self) -> bool:
        return True

    @property
    def is_compound(self) -> bool:
        return True

    def compute(self, *inputs: jax.Array) -> Any:
        (x,) = inputs
        window, strides = (1, *self.window, 1), (1, *self.strides, 1)
        sums = lax.reduce_window(x, 0.0, lax.add, window, strides, "VALID")
        return sums / (self.window[0] * self.window[1])

    def simulate(
        self,
        inputs: Sequence[Any],
        grids: Sequence[Any],
        output: Grid,
        kernels: Kernels,
    ) -> jax.Array:
        (x,), (grid,) = inputs, grids
        return pooling.average_pool_2d(x, grid, output, self.window, self.strides)


@dataclasses.dataclass(frozen=True)
class MaxPool2D(Operator):
    """The largest value of windows of [N, H, W, C]; padding is "SAME" or "VALID"."""

    window: tuple[int, int]
    strides: tuple[int, int]
    padding: str

    name = "max_pool_2d"

    @property
    def moves_values(self) -> bool:
        return True

    def compute(self, *inputs: jax.Array) -> Any:
        (x,) = inputs
        window, strides = (1, *self.window, 1), (1, *self.strides, 1)
        return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, self.padding)

    def simulate(
        self,
        inputs: Sequence[Any],
        grids: Sequence[Any],
        output: Grid,
        kernels: Kernels,
    ) -> jax.Array:
        (x,), (grid,) = inputs, grids
        return pooling.max_pool_2d(
            x, grid, output, self.window, self.strides, self.padding
        )
