"""The integers that an operator computes of its inputs."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from aqtlite.edge.arithmetic import rescaling
from aqtlite.edge.arithmetic.kernels import Kernels
from aqtlite.edge.graph import Node
from aqtlite.edge.grid import Grid, Quantized


def integers(
    node: Node,
    inputs: Sequence[Any],
    operands: Mapping[int, Quantized],
    grids: Mapping[int, Grid],
    kernels: Kernels,
) -> jax.Array:
    """The integers of an operator's output.

    Args:
        node: the operator.
        inputs: integers, floats to be rounded, or what has no grid.
        operands: known operands, by position.
        grids: grids of the values that are computed.
        kernels: whose arithmetic.
    """
    taken: list[Any] = []
    for position, (value, x) in enumerate(zip(node.inputs, inputs, strict=True)):
        grid = grids.get(value)
        if position in operands:
            one = operands[position]
            taken.append(Quantized(jnp.asarray(one.qvalue, _dtype(one.grid)), one.grid))
        elif grid is None:
            taken.append(x)
        else:
            is_float = jnp.issubdtype(x.dtype, jnp.floating)
            x = rescaling.quantize(x, grid, kernels) if is_float else x
            taken.append(Quantized(x, grid))
    # A comparison has integers as its inputs alone.
    of_inputs = [x.grid for x in taken if isinstance(x, Quantized)]
    output = grids.get(node.output) or of_inputs[0]
    return node.operator.simulate(output, kernels, *taken)


def _dtype(grid: Grid) -> str:
    """The dtype in which the integers of a grid are held: int8 for narrower ones."""
    return "int8" if grid.dtype in ("int2", "int4") else grid.dtype
