"""Deployed programs, with quantized constants: exported, verified and simulated."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from aqtlite import calibration, config, numerics
from aqtlite.edge import grids as grids_lib
from aqtlite.edge import program as program_lib
from aqtlite.edge import weights as weights_lib
from aqtlite.edge.graph import Node
from aqtlite.edge.grid import Grid, Quantized
from aqtlite.edge.operators.arithmetic import FUSING, Add, Multiply, Subtract
from aqtlite.edge.operators.base import is_transposed_convolution
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
"""Largest integer of a bias that converters recover exactly from its floats."""

_SMALLEST_STEP = 2.0**-100
"""Smallest step of sums: float32 below 1.2e-38 counts as zero in some programs."""

_OF_OUTPUT = 2.0**-8
"""Step of the bias of a channel with zero weights, in steps of the output."""


def known_operands(
    program: Program, node: Node, known: Mapping[int, Any], grids: Mapping[int, Grid]
) -> dict[int, Quantized]:
    """Quantizes the known operands of an operator; returns them by position.

    Args:
        program: the program of the operator.
        node: the operator.
        known: floats of the known values, by number.
        grids: grids of the computed values, by number.
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
    """Clips a known operand to what is needed to reach the ends of the output's range.

    A mask may be -1e9, and a grid that reaches so far would round all else to zero.
    """
    if not isinstance(node.operator, FUSING):
        return x
    other, output = grids[node.inputs[1 - position]], grids[node.output]
    (low, high), (least, most) = output.ends, other.ends
    if isinstance(node.operator, Multiply):
        # One step of the other operand then moves the output from end to end.
        enough = (high - low) / other.scale
        return jnp.clip(x, -enough, enough)
    if isinstance(node.operator, Add):
        return jnp.clip(x, low - most, high - least)
    if position == 0:
        return jnp.clip(x, low + least, high + most)
    return jnp.clip(x, least - high, most - low)


def _shared_grid(node: Node, grids: Mapping[int, Grid]) -> Grid:
    """The grid of all inputs and outputs of an operator that only moves values."""
    return next(grids[i] for i in (*node.outputs, *node.inputs) if i in grids)


def _symmetric(x: Any, dtype: str, axis: int | None) -> Quantized:
    """Quantizes symmetrically, per-channel along `axis`, or per-tensor if None."""
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
    """Enlarges the scales of a weight where a bias on the grid of the sums overflows.

    This happens in channels with tiny weights and an ordinary bias, such as those that
    a batch normalization has turned off. For channels of zeros, only the bias and the
    output determine the scale; channels that weight decay has brought near the smallest
    floats get one that is a normal float, and integers of zero.
    """
    scale, sums = one.grid.scale, np.float32(of_input.scale)
    axes = tuple(i for i in range(jnp.ndim(w)) if i != one.grid.axis)
    is_zero = jnp.abs(w).max(axes) == 0
    own = jnp.where(is_zero, np.float32(_OF_OUTPUT) * of_output.scale / sums, scale)
    # XLA turns division by a constant into a product: one in all programs, same bits.
    least = jnp.abs(bias) * (np.float32(1 / _LARGEST_BIAS) / sums)
    least = jnp.maximum(least, np.float32(_SMALLEST_STEP) / sums)
    scale = jnp.maximum(own, least)
    grid = dataclasses.replace(one.grid, scale=scale)
    shape = [1] * jnp.ndim(w)
    shape[grid.axis or 0] = -1
    coarser = exact.nearest_integer(jnp.asarray(w) / scale.reshape(shape))
    is_same = (scale == one.grid.scale).reshape(shape)
    qvalue = jnp.where(is_same, one.qvalue, coarser.astype(one.qvalue.dtype))
    return Quantized(qvalue, grid)


def _bias(x: Any, of_input: Grid, of_weight: Grid) -> Quantized:
    """Quantizes a bias on the grid of the sums, of scale ``s_in * s_w``."""
    scale = jnp.asarray(of_weight.scale) * of_input.scale
    q = exact.nearest_integer(jnp.asarray(x) / scale)
    return Quantized(q.astype(jnp.int32), Grid(scale, 0, "int32", 0))


def in_grid(x: Any, grid: Grid) -> Quantized:
    """Quantizes to a given grid: rounds to nearest, and clips."""
    smallest, largest = (np.float32(end - grid.zero_point) for end in grid.limits)
    # A product as in `_with_bias`; clipped before rounding, since a mask may be -1e9.
    steps = jnp.asarray(x) * (np.float32(1) / np.float32(grid.scale))
    # A variance has a NaN for zero degrees of freedom, which is not selected.
    steps = jnp.clip(jnp.nan_to_num(steps, posinf=largest), smallest, largest)
    steps = exact.nearest_integer(steps)
    return Quantized(steps.astype(jnp.int32) + grid.zero_point, grid)


_LINEAR = (Add, Subtract, Mean, Sum, LeakyRelu, Rescale)
_BILINEAR = (Weighted, BatchMatMul, Multiply)
"""Operators that compute in steps of their inputs, or in products of two such steps."""


@dataclasses.dataclass(frozen=True)
class Deployed:
    """A program with the grids of its values and its quantized constants."""

    program: Program
    grids: Mapping[int, Grid]
    """Grids of the values that are computed from the inputs, by number."""

    operands: Mapping[int, Mapping[int, Quantized]]
    """Known operands by output of the operator, then by position."""

    known: Mapping[int, Any]
    """Floats of the values that depend only on parameters and constants, by number."""

    dynamic: frozenset[int] = frozenset()
    """Outputs of operators whose activation is quantized by its own range at each call,
    by number."""

    def names(self) -> tuple[list[str], list[str]]:
        """Names of a file's inputs and outputs."""
        graph, names = self.program.graph, self.program.names
        return (
            [names[i].replace("/", "_") for i in graph.inputs],
            [f"output_{i}" if i else "output" for i in range(len(graph.outputs))],
        )


def deploy(
    model: Any,
    variables: Any,
    ranges: Ranges,
    args: tuple[Any, ...],
    rules: Sequence[Rule],
) -> Deployed:
    """Makes a program of a model, and quantizes its constants.

    Args:
        model: a Linen module, an NNX module, or a function of variables and arguments.
        variables: variables of the model, concrete.
        ranges: ranges of the model's values.
        args: sample arguments, or their shapes.
        rules: rules that select the integers of each operator.
    """
    grids_lib.check(ranges)  # Before the model is traced with swapped arguments.
    program = program_lib.make(model, variables, args, rules)
    grids = grids_lib.resolve(program, ranges)
    known = _known(program, variables, args)
    operands = {}
    for node in program.graph.nodes:
        if program.is_quantized(node) and node.output not in known:
            found = known_operands(program, node, known, grids)
            operands[node.output] = {i: _in_numpy(x) for i, x in found.items()}
            _check_finite(node, operands[node.output])
            _check_range(program, node, grids, operands[node.output])
    return Deployed(program, grids, operands, known)


def deploy_as_configured(model: Any, variables: Any, args: tuple[Any, ...]) -> Deployed:
    """Makes a program in float of a model converted for serving, or of a float model.

    Args:
        model: a Linen module, an NNX module, or a function of variables and arguments.
        variables: variables of the model, concrete.
        args: sample arguments, or their shapes.

    Raises:
        ValueError: if a frozen weight has no form in a file, or a weight has NaN.
    """
    program = program_lib.make_as_configured(model, variables, args)
    known = _known(program, variables, args)
    frozen = weights_lib.frozen(program.graph, known)
    operands, dynamic = {}, set[int]()
    for node in program.graph.nodes:
        if weights_lib.has_weight(node) and node.output not in known:
            _check_no_nan(node, known)
        if weights_lib.has_weight(node) and node.inputs[1] in frozen:
            weight = frozen[node.inputs[1]]
            operands[node.output] = {1: weight.quantized}
            if weight.is_dynamic and not is_transposed_convolution(node.operator):
                dynamic.add(node.output)
    return Deployed(program, {}, operands, known, frozenset(dynamic))


def _known(program: Program, variables: Any, args: tuple[Any, ...]) -> dict[int, Any]:
    """Computes the values that depend only on parameters and constants, by number."""
    graph, values = program.graph, program.bind(variables, args)
    known: dict[int, Any] = dict(graph.constants)
    known.update((i, values[i]) for i in graph.parameters)
    for node in graph.nodes:
        if program.static.issuperset(node.outputs):
            outputs = node.compute([known[i] for i in node.inputs])
            known.update(zip(node.outputs, outputs, strict=True))
    return known


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


def _check_no_nan(node: Node, known: Mapping[int, Any]) -> None:
    for value in node.inputs:
        x = known.get(value)
        if (
            x is not None
            and jnp.issubdtype(x.dtype, jnp.floating)
            and bool(jnp.isnan(x).any())
        ):
            raise ValueError(
                f"an operand of {node.place} ({node.operator.name}), of shape "
                f"{x.shape}, has NaN: check the variables. Those of a conversion for "
                "serving have NaN in place of frozen weights: export them with the "
                "quantized model that was converted"
            )


def _check_range(
    program: Program,
    node: Node,
    grids: Mapping[int, Grid],
    operands: Mapping[int, Quantized],
) -> None:
    """Checks that one step of the sums is smaller than the output's whole range.

    Otherwise some runtimes refuse the file, and some crash.
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
