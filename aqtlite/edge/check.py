"""The check of an exported file against the program that it is made of.

The converter orders operators anew, and makes one of some. So what is compared are
sets: every constant of the file is one of the program's, and every weight and bias of
the program is in the file; every scale and zero point that the file computes is one of
the program's. No operator gives floats unless a rule allows it.
"""

from collections.abc import Iterator

import numpy as np

from aqtlite.edge.deployed import Deployed
from aqtlite.edge.flatbuffer import File, Tensor
from aqtlite.edge.graph import Node
from aqtlite.edge.grid import Quantized
from aqtlite.edge.operators.contractions import Conv2D, Weighted
from aqtlite.edge.report import Report

_AT_THE_ENDS = ("QUANTIZE", "DEQUANTIZE")


_ONLY_INT8 = (
    *("concatenation", "conv_2d", "depthwise_conv_2d", "gather", "gelu", "hard_swish"),
    *("log", "log_softmax"),
)
"""The operators that LiteRT or its converter has no int16 form of."""


def check_widths(deployed: Deployed) -> None:
    """Checks that there is an operator for all that rules ask for.

    Raises:
        ValueError: if not; it names them.
    """
    program = deployed.program
    refused = [
        f"{node.place}: {node.operator.name}"
        for node in program.graph.nodes
        if node.operator.name in _ONLY_INT8
        and node.output in deployed.grids
        and program.is_quantized(node)
        and program.rule_of(node).activations == "int16"
    ]
    if refused:
        raise ValueError(
            "these operators have no int16 form in LiteRT; put an edge.Rule of int8 "
            "for them before that of int16:\n  " + "\n  ".join(refused)
        )


def check(file: File, deployed: Deployed) -> Report:
    """Compares a file with the program that it is made of.

    Raises:
        ValueError: if it is another program, or has operators of floats that no rule
            allows; it names them.
    """
    report = Report(file)
    _check_floats(report, deployed)
    _check_constants(file, deployed)
    _check_grids(file, deployed)
    return report


def _check_floats(report: Report, deployed: Deployed) -> None:
    program = deployed.program
    allowed = [
        node
        for node in program.graph.nodes
        if not program.static.issuperset(node.outputs)
        and not program.is_quantized(node)
        and any(map(program.graph.is_float, (*node.inputs, *node.outputs)))
    ]
    found = [one for one in report.float_operators if one.name not in _AT_THE_ENDS]
    if found and not allowed:
        names = ", ".join(f"{one.name} ({one.outputs[0].name})" for one in found)
        raise ValueError(
            f"the converter left operators in float: {names}. Leave them in float by "
            "edge.Rule(path=..., is_float=True), or out of what is exported"
        )


def _check_constants(file: File, deployed: Deployed) -> None:
    """Compares the integers of weights, biases and other known operands."""
    in_file = {
        _key(tensor.array(), tensor.scale, tensor.zero_point): tensor
        for tensor in _tensors(file)
        if tensor.data is not None
        and tensor.scale is not None
        # A convolution without bias has one of zeros.
        and not (tensor.dtype == "int32" and not tensor.array().any())
    }
    in_program: dict[tuple[bytes, ...], str] = {}
    for node in deployed.program.graph.nodes:
        for position, one in deployed.operands.get(node.outputs[0], {}).items():
            zero_points = np.full(np.size(one.grid.scale), one.grid.zero_point)
            keys = [
                _key(array, one.grid.scale, zero_points)
                for array in _layouts(node, position, one)
            ]
            in_program.update(dict.fromkeys(keys, node.place))
            is_needed = isinstance(node.operator, Weighted) and one.qvalue.any()
            if is_needed and not any(key in in_file for key in keys):
                what = "weight" if position == 1 else "bias"
                raise ValueError(
                    f"the integers of the {what} of {node.place} "
                    f"({node.operator.name}) are not in the file of the converter"
                )
    for key, tensor in in_file.items():
        if key not in in_program:
            raise ValueError(
                f"the converter made integers of its own: {tensor.name!r}, a constant "
                f"{tensor.dtype} of shape {tensor.shape}, is none of the program's"
            )


def _check_grids(file: File, deployed: Deployed) -> None:
    """Compares the scales and zero points of what is computed."""
    in_program = {
        (grid.dtype, np.float32(grid.scale).tobytes(), int(grid.zero_point))
        for grid in deployed.grids.values()
    }
    for tensor in _tensors(file):
        if tensor.data is not None or tensor.scale is None or tensor.zero_point is None:
            continue
        if len(tensor.scale) != 1:
            raise ValueError(f"{tensor.name!r} has a scale for each channel")
        scale, zero_point = tensor.scale[0], int(tensor.zero_point[0])
        if (tensor.dtype, scale.tobytes(), zero_point) not in in_program:
            raise ValueError(
                f"the converter chose integers of its own: {tensor.name!r} is "
                f"{tensor.dtype} with scale {scale} and zero point {zero_point}, as "
                "nothing in the program is"
            )


def _tensors(file: File) -> Iterator[Tensor]:
    yield from file.inputs
    for operator in file.operators:
        yield from (t for t in operator.inputs if t is not None)
        yield from operator.outputs


def _layouts(node: Node, position: int, one: Quantized) -> list[np.ndarray]:
    """The orders of axes in which a file may have an operand."""
    array = np.asarray(one.qvalue)
    if position != 1 or not isinstance(node.operator, Weighted):
        return [array]
    if isinstance(node.operator, Conv2D):
        # Depthwise or not: of one channel, either is the other.
        return [array.transpose(2, 0, 1, 3), array.transpose(3, 0, 1, 2)]
    return [array.T]


def _key(array: np.ndarray, scale: object, zero_point: object) -> tuple[bytes, ...]:
    """Integers, scales and zero points as bytes; shapes of size 1 do not count."""
    return (
        np.asarray(array, np.int64).tobytes(),
        np.asarray(scale, np.float32).reshape(-1).tobytes(),
        np.asarray(zero_point, np.int64).reshape(-1).tobytes(),
    )
