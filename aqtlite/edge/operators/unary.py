"""Elementwise functions of one value, and softmax."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.edge.arithmetic import softmax, unary
from aqtlite.edge.arithmetic.kernels import Kernels
from aqtlite.edge.grid import Grid, Quantized
from aqtlite.edge.operators.base import Operator


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


FUNCTIONS: dict[str, Callable[[jax.Array], Any]] = {
    "abs": jnp.abs,
    "exp": jnp.exp,
    "gelu": _gelu,
    "hard_swish": jax.nn.hard_swish,
    "log": jnp.log,
    "logistic": jax.nn.sigmoid,
    "rsqrt": lax.rsqrt,
    "sqrt": jnp.sqrt,
    "tanh": jnp.tanh,
}
"""Unary functions by name, in a form that the converter recognises."""

_TABLES: dict[str, Callable[[Grid, Grid], unary.Table]] = {
    "abs": unary.abs,
    "exp": unary.exp,
    "gelu": unary.gelu,
    "hard_swish": unary.hard_swish,
    "log": unary.log,
    "rsqrt": unary.rsqrt,
    "sqrt": unary.sqrt,
}
"""Tables of the functions on which all kernels agree, by name."""

_FIXED = {"logistic": (1 / 256, -128, 1 / 32768), "tanh": (1 / 128, 0, 1 / 32768)}


@dataclasses.dataclass(frozen=True)
class Unary(Operator):
    """An elementwise function from `FUNCTIONS`."""

    function: str

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the function."""
        return self.function

    @property
    def is_compound(self) -> bool:
        return self.function in ("gelu", "hard_swish")

    def fixed_grid(self, dtype: str) -> Grid | None:
        return fixed(dtype, *_FIXED[self.function]) if self.function in _FIXED else None

    def compute(self, x: jax.Array) -> jax.Array:
        y: jax.Array = FUNCTIONS[self.function](x)
        return y

    def simulate(self, output: Grid, kernels: Kernels, x: Quantized) -> jax.Array:
        if self.function in ("tanh", "logistic"):
            table = getattr(unary, self.function)(x.grid, output, kernels)
        else:
            table = _TABLES[self.function](x.grid, output)
        return unary.lookup(table, x.qvalue)


@dataclasses.dataclass(frozen=True)
class LeakyRelu(Operator):
    """``x`` where positive, otherwise ``slope * x``."""

    slope: float

    name = "leaky_relu"
    is_compound = True

    def compute(self, x: jax.Array) -> jax.Array:
        return jax.nn.leaky_relu(x, self.slope)

    def simulate(self, output: Grid, kernels: Kernels, x: Quantized) -> jax.Array:
        table = unary.leaky_relu(x.grid, output, self.slope, kernels)
        return unary.lookup(table, x.qvalue)


@dataclasses.dataclass(frozen=True)
class Softmax(Operator):
    """The softmax along the last axis."""

    name = "softmax"
    is_compound = True

    def fixed_grid(self, dtype: str) -> Grid | None:
        return fixed(dtype, 1 / 256, -128, 1 / 32768)

    def compute(self, x: jax.Array) -> jax.Array:
        return jax.nn.softmax(x, axis=-1)

    def simulate(self, output: Grid, kernels: Kernels, x: Quantized) -> jax.Array:
        return softmax.softmax(x, output)


@dataclasses.dataclass(frozen=True)
class LogSoftmax(Operator):
    """The logarithm of the softmax along the last axis."""

    name = "log_softmax"
    is_compound = True

    def fixed_grid(self, dtype: str) -> Grid | None:
        return fixed(dtype, 16 / 256, 127, 16 / 65536)

    def compute(self, x: jax.Array) -> jax.Array:
        shifted = x - jnp.max(x, -1, keepdims=True)
        return shifted - jnp.log(jnp.sum(jnp.exp(shifted), -1, keepdims=True))

    def simulate(self, output: Grid, kernels: Kernels, x: Quantized) -> jax.Array:
        return softmax.log_softmax(x, output)


def fixed(dtype: str, scale: float, zero_point: int, of_int16: float) -> Grid | None:
    """The output grid that LiteRT's kernels require for a dtype, if any."""
    if dtype == "int8":
        return Grid(np.float32(scale), zero_point)
    return Grid(np.float32(of_int16), 0, "int16")
