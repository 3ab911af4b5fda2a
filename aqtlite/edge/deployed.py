"""A program with all integers in it: what is exported, checked and simulated."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aqtlite.edge import grids as grids_lib
from aqtlite.edge import program as program_lib
from aqtlite.edge import stored
from aqtlite.edge.graph import Node
from aqtlite.edge.grid import Grid, Quantized
from aqtlite.edge.operators.arithmetic import Add, Multiply, Subtract
from aqtlite.edge.operators.contractions import BatchMatMul, Weighted
from aqtlite.edge.operators.layout import Rescale
from aqtlite.edge.operators.reductions import Mean, Sum
from aqtlite.edge.operators.unary import LeakyRelu
from aqtlite.edge.program import Program
from aqtlite.edge.ranges import Ranges
from aqtlite.edge.rules import Rule

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
            found = stored.operands(program, node, known, grids)
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
