"""Reductions over axes, and pooling over windows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.edge.arithmetic import reductions
from aqtlite.edge.arithmetic.kernels import Kernels
from aqtlite.edge.grid import Grid, Quantized
from aqtlite.edge.operators.base import Moving, Operator


@dataclasses.dataclass(frozen=True)
class Mean(Operator):
    """The mean over axes."""

    axes: tuple[int, ...]

    name = "mean"
    is_compound = True

    def compute(self, x: jax.Array) -> jax.Array:
        return jnp.mean(x, axis=self.axes)

    def simulate(self, output: Grid, kernels: Kernels, x: Quantized) -> jax.Array:
        return reductions.mean(x, output, self.axes, kernels)


@dataclasses.dataclass(frozen=True)
class Sum(Operator):
    """The sum over axes."""

    axes: tuple[int, ...]

    name = "sum"

    def compute(self, x: jax.Array) -> jax.Array:
        return jnp.sum(x, axis=self.axes)

    def simulate(self, output: Grid, kernels: Kernels, x: Quantized) -> jax.Array:
        return reductions.total(x, output, self.axes)


@dataclasses.dataclass(frozen=True)
class ReduceMax(Moving):
    """The maximum over axes."""

    axes: tuple[int, ...]

    name = "reduce_max"

    def compute(self, x: jax.Array) -> jax.Array:
        return jnp.max(x, axis=self.axes)


@dataclasses.dataclass(frozen=True)
class ReduceMin(Moving):
    """The minimum over axes."""

    axes: tuple[int, ...]

    name = "reduce_min"

    def compute(self, x: jax.Array) -> jax.Array:
        return jnp.min(x, axis=self.axes)


@dataclasses.dataclass(frozen=True)
class AveragePool2D(Operator):
    """The mean over windows of [N, H, W, C], without padding.

    Runtimes average the integers without rescaling.
    """

    window: tuple[int, int]
    strides: tuple[int, int]

    name = "average_pool_2d"
    moves_values = True
    is_compound = True

    def compute(self, x: jax.Array) -> jax.Array:
        window, strides = (1, *self.window, 1), (1, *self.strides, 1)
        sums = lax.reduce_window(x, 0.0, lax.add, window, strides, "VALID")
        return sums / (self.window[0] * self.window[1])

    def simulate(self, output: Grid, kernels: Kernels, x: Quantized) -> jax.Array:
        return reductions.average_pool_2d(x.qvalue, self.window, self.strides)


@dataclasses.dataclass(frozen=True)
class MaxPool2D(Moving):
    """The maximum over windows of [N, H, W, C]; padding is "SAME" or "VALID"."""

    window: tuple[int, int]
    strides: tuple[int, int]
    padding: str

    name = "max_pool_2d"

    def compute(self, x: jax.Array) -> jax.Array:
        window, strides = (1, *self.window, 1), (1, *self.strides, 1)
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        lowest = -np.inf if is_float else np.iinfo(x.dtype).min
        start = np.asarray(lowest, x.dtype)
        return lax.reduce_window(x, start, lax.max, window, strides, self.padding)
