"""Integers that a file stores: weights, biases and other known operands."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from aqtlite import calibration, config, numerics
from aqtlite.edge.graph import Node
from aqtlite.edge.grid import Grid, Quantized
from aqtlite.edge.operators.arithmetic import FUSING, Add, Multiply
from aqtlite.edge.operators.contractions import Weighted
from aqtlite.edge.program import Program
from aqtlite.lowering import exact
from aqtlite.quantization.quantize import quantize

_BITS = {"int2": 2, "int4": 4, "int8": 8, "int16": 16}

_LARGEST_BIAS = 2.0**22
"""The integers of a bias: up to here, converters find them again in its floats."""

_OF_OUTPUT = 2.0**-8
"""The step of the bias of weights that are zero, in steps of the output."""


def operands(
    program: Program, node: Node, known: Mapping[int, Any], grids: Mapping[int, Grid]
) -> dict[int, Quantized]:
    """The known operands of an operator, by position.

    Args:
        program: the program of the operator.
        node: the operator.
        known: floats by value.
        grids: grids of the values that are computed.
    """
    found: dict[int, Quantized] = {}
    rule = program.rule_of(node)
    for position, value in enumerate(node.inputs):
        if value not in program.static or not program.graph.is_float(value):
            continue
        x = known[value]
        if isinstance(node.operator, Weighted) and position == 1:
            one = _symmetric(x, rule.weights, node.operator.channel_axis)
            bias = known[node.inputs[2]] if len(node.inputs) > 2 else 0.0
            of_input, of_output = grids[node.inputs[0]], grids[node.output]
            found[1] = _with_bias(one, x, bias, of_input, of_output)
        elif isinstance(node.operator, Weighted) and position == 2:
            found[2] = _bias(x, grids[node.inputs[0]], found[1].grid)
        elif node.operator.moves_values:
            found[position] = in_grid(x, _shared_grid(node, grids))
        else:
            limited = _limited(node, position, x, grids)
            found[position] = _symmetric(limited, rule.activations, None)
    return found


def _limited(node: Node, position: int, x: Any, grids: Mapping[int, Grid]) -> Any:
    """A known operand without what moves the output beyond its range in any case.

    A mask may be -1e9: steps of that size would leave no room for other operands.
    """
    if not isinstance(node.operator, FUSING):
        return x
    other, output = grids[node.inputs[1 - position]], grids[node.output]
    (low, high), (least, most) = output.ends, other.ends
    if isinstance(node.operator, Multiply):
        # One step of the other operand, and the output has gone from end to end.
        enough = (high - low) / other.scale
        return jnp.clip(x, -enough, enough)
    if isinstance(node.operator, Add):
        return jnp.clip(x, low - most, high - least)
    if position == 0:
        return jnp.clip(x, low + least, high + most)
    return jnp.clip(x, least - high, most - low)


def _shared_grid(node: Node, grids: Mapping[int, Grid]) -> Grid:
    """The grid of all values of an operator that moves values."""
    return next(grids[i] for i in (*node.outputs, *node.inputs) if i in grids)


def _symmetric(x: Any, dtype: str, axis: int | None) -> Quantized:
    """Integers around zero, with a scale for each channel, or one."""
    tensor = config.Tensor(
        numerics=numerics.IntSymmetric(bits=_BITS[dtype], preserve_max_val=True),
        calibration=calibration.AbsMax(),
    )
    shared = tuple(i for i in range(jnp.ndim(x)) if i != axis)
    if not jnp.ndim(x):
        of_one = _symmetric(jnp.reshape(x, (1,)), dtype, None)
        return Quantized(of_one.qvalue.reshape(()), of_one.grid)
    q = quantize(x, tensor, shared)
    scale = q.scale.reshape(() if axis is None else (-1,))
    return Quantized(q.qvalue.astype(jnp.int32), Grid(scale, 0, dtype, axis))


def _with_bias(
    one: Quantized, w: Any, bias: Any, of_input: Grid, of_output: Grid
) -> Quantized:
    """A weight whose scales leave room for a bias, which has the grid of the sums.

    Where weights are tiny and a bias is not, such as in a channel that a batch
    normalization has turned off, the bias would not fit into its integers; where all
    weights of a channel are zero, their scale is the bias's alone.
    """
    scale, sums = one.grid.scale, np.float32(of_input.scale)
    axes = tuple(i for i in range(jnp.ndim(w)) if i != one.grid.axis)
    is_zero = jnp.abs(w).max(axes) == 0
    own = jnp.where(is_zero, np.float32(_OF_OUTPUT) * of_output.scale / sums, scale)
    # XLA makes products of divisions by constants, so that this is one everywhere.
    least = jnp.abs(bias) * (np.float32(1 / _LARGEST_BIAS) / sums)
    scale = jnp.maximum(own, least)
    grid = dataclasses.replace(one.grid, scale=scale)
    shape = [1] * jnp.ndim(w)
    shape[grid.axis or 0] = -1
    coarser = exact.nearest_integer(jnp.asarray(w) / scale.reshape(shape))
    is_same = (scale == one.grid.scale).reshape(shape)
    qvalue = jnp.where(is_same, one.qvalue, coarser.astype(jnp.int32))
    return Quantized(qvalue, grid)


def _bias(x: Any, of_input: Grid, of_weight: Grid) -> Quantized:
    """Integers on the grid of the sums: ``s_in * s_w``."""
    scale = jnp.asarray(of_weight.scale) * of_input.scale
    q = exact.nearest_integer(jnp.asarray(x) / scale)
    return Quantized(q.astype(jnp.int32), Grid(scale, 0, "int32", 0))


def in_grid(x: Any, grid: Grid) -> Quantized:
    """Integers of a grid that is given: rounded to nearest, and clipped."""
    smallest, largest = (np.float32(end - grid.zero_point) for end in grid.limits)
    # As in `_with_bias`, a product; and clipped first, since a mask may be -1e9.
    steps = jnp.asarray(x) * (np.float32(1) / np.float32(grid.scale))
    # A variance has NaN where there are no degrees of freedom, selected nowhere.
    steps = jnp.clip(jnp.nan_to_num(steps, posinf=largest), smallest, largest)
    steps = exact.nearest_integer(steps)
    return Quantized(steps.astype(jnp.int32) + grid.zero_point, grid)
