"""What an operator computes of integers, its known operands among them."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from aqtlite.edge.arithmetic import rescaling
from aqtlite.edge.arithmetic.kernels import Kernels
from aqtlite.edge.graph import Node
from aqtlite.edge.grid import Grid
from aqtlite.edge.stored import Stored


def integers(
    node: Node,
    inputs: Sequence[Any],
    operands: Mapping[int, Stored],
    grids: Mapping[int, Grid],
    kernels: Kernels,
) -> jax.Array:
    """The integers of an operator's output.

    Args:
        node: the operator.
        inputs: integers, floats to be rounded, or what has no grid.
        operands: those that are known, by position.
        grids: grids of the values that are computed.
        kernels: whose arithmetic.
    """
    taken, of_inputs = [], []
    for position, (value, x) in enumerate(zip(node.inputs, inputs, strict=True)):
        grid = grids.get(value)
        if position in operands:
            one = operands[position]
            grid, x = one.grid, jnp.asarray(one.qvalue, _dtype(one.grid))
        elif grid is not None and jnp.issubdtype(x.dtype, jnp.floating):
            x = rescaling.quantize(x, grid, kernels)
        taken.append(x)
        of_inputs.append(grid)
    # A comparison has integers as its inputs alone.
    (output,) = [g for g in (grids.get(node.output), *of_inputs) if g is not None][:1]
    return node.operator.simulate(taken, of_inputs, output, kernels)


def _dtype(grid: Grid) -> str:
    """The dtype in which the integers of a grid are held: int8 for narrower ones."""
    return "int8" if grid.dtype in ("int2", "int4") else grid.dtype
