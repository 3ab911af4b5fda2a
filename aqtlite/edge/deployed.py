"""A program with all integers in it: what is exported, checked and simulated."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from aqtlite import calibration, config, numerics
from aqtlite.edge import grids as grids_lib
from aqtlite.edge import program as program_lib
from aqtlite.edge.graph import Node
from aqtlite.edge.grid import Grid, Quantized
from aqtlite.edge.operators.arithmetic import FUSING, Add, Multiply, Subtract
from aqtlite.edge.operators.contractions import BatchMatMul, Weighted
from aqtlite.edge.operators.layout import Rescale
from aqtlite.edge.operators.reductions import Mean, Sum
from aqtlite.edge.operators.unary import LeakyRelu
from aqtlite.edge.program import Program
from aqtlite.edge.ranges import Ranges
from aqtlite.edge.rules import Rule
from aqtlite.lowering import exact
from aqtlite.quantization.quantize import quantize

_BITS = {"int2": 2, "int4": 4, "int8": 8, "int16": 16}

_LARGEST_BIAS = 2.0**22
"""The integers of a bias: up to here, converters find them again in its floats."""

_OF_OUTPUT = 2.0**-8
"""The step of the bias of weights that are zero, in steps of the output."""


def known_operands(
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
    return Quantized(q.qvalue, Grid(scale, 0, dtype, axis))


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
    qvalue = jnp.where(is_same, one.qvalue, coarser.astype(one.qvalue.dtype))
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


_LINEAR = (Add, Subtract, Mean, Sum, LeakyRelu, Rescale)
_BILINEAR = (Weighted, BatchMatMul, Multiply)
"""The operators whose output has steps that are multiples of their inputs' steps."""


@dataclasses.dataclass(frozen=True)
class Deployed:
    """A program with all integers in it."""

    program: Program
    grids: Mapping[int, Grid]
    """Grids of the values that are computed from the inputs."""

    operands: Mapping[int, Mapping[int, Quantized]]
    """The known operands of each operator, by its output and their position."""

    known: Mapping[int, Any]
    """The values that depend on parameters and constants alone."""


def deploy(
    model: Any,
    variables: Any,
    ranges: Ranges,
    args: tuple[Any, ...],
    rules: Sequence[Rule],
) -> Deployed:
    """Quantizes what a program stores.

    Args:
        model: a Linen module, an NNX module, or a function of variables and arguments.
        variables: variables of the model, arrays.
        ranges: ranges of the model's values.
        args: sample arguments, or their shapes.
        rules: integers of each operator.
    """
    program = program_lib.make(model, variables, args, rules)
    grids = grids_lib.resolve(program, ranges)
    graph = program.graph
    values = program.bind(variables, args)
    known: dict[int, Any] = dict(graph.constants)
    known.update((i, values[i]) for i in graph.parameters)
    operands = {}
    for node in graph.nodes:
        if program.static.issuperset(node.outputs):
            inputs = [known[i] for i in node.inputs]
            outputs = node.compute(inputs)
            known.update(zip(node.outputs, outputs, strict=True))
        elif program.is_quantized(node):
            found = known_operands(program, node, known, grids)
            operands[node.output] = {i: _in_numpy(x) for i, x in found.items()}
            _check_finite(node, operands[node.output])
            _check_range(program, node, grids, operands[node.output])
    return Deployed(program, grids, operands, known)


def _in_numpy(x: Quantized) -> Quantized:
    scale = np.asarray(x.grid.scale, np.float32)
    return Quantized(np.asarray(x.qvalue), dataclasses.replace(x.grid, scale=scale))


def _check_finite(node: Node, operands: Mapping[int, Quantized]) -> None:
    for position, one in operands.items():
        if not np.isfinite(one.grid.scale).all():
            what = "weight" if position == 1 else "known operand"
            raise ValueError(
                f"the {what} of {node.place} ({node.operator.name})"
                f", of shape {one.qvalue.shape}, has NaN or infinity: check the "
                "variables"
            )


def _check_range(
    program: Program,
    node: Node,
    grids: Mapping[int, Grid],
    operands: Mapping[int, Quantized],
) -> None:
    """Checks that a step of the sums is not more than all steps of the output.

    Runtimes have no kernels for that: some refuse the file, some end the process.
    """
    output = grids.get(node.output)
    if output is None or not isinstance(node.operator, (*_LINEAR, *_BILINEAR)):
        return
    of_inputs = [
        np.max(operands[i].grid.scale if i in operands else grids[value].scale)
        for i, value in enumerate(node.inputs[:2])
    ]
    is_product = isinstance(node.operator, _BILINEAR)
    step = np.prod(of_inputs) if is_product else np.max(of_inputs)
    low, high = output.limits
    steps = float(step / output.scale)
    if not steps < high - low + 1:
        raise ValueError(
            f"the range of {program.names[node.output]!r} is too narrow for what it is "
            f"computed from: one step of that is {steps:.3g} of its {high - low + 1}. "
            "Give the model data or weights whose differences are larger, widen the "
            "range (Ranges.replace), or leave the operator in float by "
            f"edge.Rule(path={node.path!r}, is_float=True)"
        )
