"""Operators that move elements without changing them, and rescaling."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.edge.arithmetic import rescaling
from aqtlite.edge.arithmetic.kernels import Kernels
from aqtlite.edge.grid import Grid, Quantized
from aqtlite.edge.operators.base import Moving, Operator


@dataclasses.dataclass(frozen=True)
class Reshape(Moving):
    """A change of shape that keeps the order of elements."""

    shape: tuple[int, ...]

    name = "reshape"

    def compute(self, x: jax.Array) -> jax.Array:
        return x.reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class Transpose(Moving):
    """A permutation of axes."""

    permutation: tuple[int, ...]

    name = "transpose"

    def compute(self, x: jax.Array) -> jax.Array:
        return x.transpose(self.permutation)


@dataclasses.dataclass(frozen=True)
class BroadcastTo(Moving):
    """A broadcast to a shape, as by `jnp.broadcast_to`."""

    shape: tuple[int, ...]

    name = "broadcast_to"

    def compute(self, x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, self.shape)


@dataclasses.dataclass(frozen=True)
class Slice(Moving):
    """A slice with start, limit and stride along every axis."""

    start: tuple[int, ...]
    limit: tuple[int, ...]
    strides: tuple[int, ...]

    name = "slice"

    def compute(self, x: jax.Array) -> jax.Array:
        return lax.slice(x, self.start, self.limit, self.strides)


@dataclasses.dataclass(frozen=True)
class Pad(Moving):
    """Padding with zeros."""

    widths: tuple[tuple[int, int], ...]

    name = "pad"

    def compute(self, x: jax.Array) -> jax.Array:
        return jnp.pad(x, self.widths)

    def simulate(self, output: Grid, kernels: Kernels, x: Quantized) -> jax.Array:
        zero = np.asarray(x.grid.zero_point, x.qvalue.dtype)
        return jnp.pad(x.qvalue, self.widths, constant_values=zero)


@dataclasses.dataclass(frozen=True)
class Concatenate(Moving):
    """A concatenation of arrays along an axis."""

    axis: int

    name = "concatenation"

    def compute(self, *inputs: jax.Array) -> jax.Array:
        return jnp.concatenate(inputs, axis=self.axis)


@dataclasses.dataclass(frozen=True)
class Take(Moving):
    """Slices along an axis by index, such as rows of an embedding table."""

    axis: int

    name = "gather"

    def compute(self, x: jax.Array, indices: jax.Array) -> jax.Array:
        return jnp.take(x, indices, axis=self.axis, mode="clip")


@dataclasses.dataclass(frozen=True)
class Select(Moving):
    """Elements of two arrays selected by a condition: ``where(condition, x, y)``."""

    name = "select"

    def compute(self, condition: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(condition, x, y)


@dataclasses.dataclass(frozen=True)
class Rescale(Operator):
    """Conversion of values to the integers of another grid."""

    dtype: str = "int8"
    """Dtype of the output, set by the operator that uses it and not by rules."""

    name = "quantize"

    def compute(self, x: jax.Array) -> jax.Array:
        return x

    def simulate(self, output: Grid, kernels: Kernels, x: Quantized) -> jax.Array:
        return rescaling.rescale(x, output, kernels)
