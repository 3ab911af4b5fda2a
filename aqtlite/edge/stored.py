"""What a file stores: the integers of weights, biases and other known operands."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import calibration, config, numerics, quantizer
from aqtlite.edge.graph import Node
from aqtlite.edge.grid import Grid
from aqtlite.edge.operators.contractions import WEIGHTED
from aqtlite.edge.program import Program
from aqtlite.lowering import exact

_BITS = {"int2": 2, "int4": 4, "int8": 8, "int16": 16}


@dataclasses.dataclass(frozen=True)
class Stored:
    """A known array as integers."""

    qvalue: Any
    """int32, whatever they are stored as."""

    grid: Grid

    def dequant(self) -> jax.Array:
        """The floats that the integers stand for."""
        scale = jnp.asarray(self.grid.scale)
        if self.grid.axis is not None:
            shape = [1] * self.qvalue.ndim
            shape[self.grid.axis] = -1
            scale = scale.reshape(shape)
        steps = jnp.asarray(self.qvalue) - self.grid.zero_point
        return steps.astype(jnp.float32) * scale

    def known(self) -> "Stored":
        """The same as arrays of NumPy."""
        scale = np.asarray(self.grid.scale, np.float32)
        grid = dataclasses.replace(self.grid, scale=scale)
        return Stored(np.asarray(self.qvalue), grid)


def operands(
    program: Program, node: Node, known: Mapping[int, Any], grids: Mapping[int, Grid]
) -> dict[int, Stored]:
    """The known operands of an operator, by position.

    Args:
        program: that the operator is of.
        node: the operator.
        known: floats by value.
        grids: of the values that are computed.
    """
    found: dict[int, Stored] = {}
    rule = program.rule_of(node)
    for position, value in enumerate(node.inputs):
        if value not in program.static or not program.graph.is_float(value):
            continue
        x = known[value]
        if isinstance(node.operator, WEIGHTED) and position == 1:
            found[1] = _symmetric(x, rule.weights, node.operator.channel_axis)
        elif isinstance(node.operator, WEIGHTED) and position == 2:
            found[2] = _bias(x, grids[node.inputs[0]], found[1].grid)
        elif node.operator.moves_values:
            found[position] = in_grid(x, _shared_grid(node, grids))
        else:
            found[position] = _symmetric(x, rule.activations, None)
    return found


def _shared_grid(node: Node, grids: Mapping[int, Grid]) -> Grid:
    """The grid of all values of an operator that moves values."""
    return next(grids[i] for i in (*node.outputs, *node.inputs) if i in grids)


def _symmetric(x: Any, dtype: str, axis: int | None) -> Stored:
    """Integers around zero, with a scale for each channel, or one."""
    tensor = config.Tensor(
        numerics=numerics.IntSymmetric(bits=_BITS[dtype], preserve_max_val=True),
        calibration=calibration.AbsMax(),
    )
    shared = tuple(i for i in range(jnp.ndim(x)) if i != axis)
    if not jnp.ndim(x):
        of_one = _symmetric(jnp.reshape(x, (1,)), dtype, None)
        return Stored(of_one.qvalue.reshape(()), of_one.grid)
    q = quantizer.quantize(x, tensor, shared)
    scale = q.scale.reshape(() if axis is None else (-1,))
    return Stored(q.qvalue.astype(jnp.int32), Grid(scale, 0, dtype, axis))


def _bias(x: Any, of_input: Grid, of_weight: Grid) -> Stored:
    """Integers on the grid of the sums: ``s_in * s_w``."""
    scale = jnp.asarray(of_weight.scale) * of_input.scale
    limit = np.float32(2**31 - 256)
    q = jnp.clip(exact.nearest_integer(jnp.asarray(x) / scale), -limit, limit)
    return Stored(q.astype(jnp.int32), Grid(scale, 0, "int32", 0))


def in_grid(x: Any, grid: Grid) -> Stored:
    """Integers of a grid that is given: rounded to nearest, and clipped."""
    smallest, largest = grid.limits
    steps = exact.nearest_integer(jnp.asarray(x) / grid.scale)
    steps = jnp.clip(steps, smallest - grid.zero_point, largest - grid.zero_point)
    return Stored(steps.astype(jnp.int32) + grid.zero_point, grid)
