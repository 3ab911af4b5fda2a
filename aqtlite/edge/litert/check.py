"""Verification of a LiteRT file: its constants, grids, and float operators."""

from collections.abc import Collection, Iterator

import numpy as np

from aqtlite.edge.check import (
    Key,
    check_constants,
    check_grids,
    digest,
    key_of,
    known_operands,
)
from aqtlite.edge.contractions import reported
from aqtlite.edge.deployed import Deployed
from aqtlite.edge.graph import Node
from aqtlite.edge.grid import Quantized
from aqtlite.edge.litert import transposed
from aqtlite.edge.operators.base import Equation
from aqtlite.edge.operators.contractions import Conv2D, Weighted
from aqtlite.edge.report import File, Report, Tensor

_AT_THE_ENDS = ("QUANTIZE", "DEQUANTIZE")


_ONLY_INT8 = (
    *("concatenation", "conv_2d", "depthwise_conv_2d", "gather", "gelu", "hard_swish"),
    *("log", "log_softmax"),
)
"""Operators without an int16 form in LiteRT or its converter."""


def check_widths(deployed: Deployed) -> None:
    """Checks that LiteRT has an int16 form of all operators with int16 rules.

    Raises:
        ValueError: if it has not; the message names the operators.
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


def check_weights(deployed: Deployed) -> None:
    """Checks that LiteRT has the grids of all frozen weights.

    Raises:
        ValueError: if it has not; the message names the operators.
    """
    if deployed.grids:
        # Of the weights of a full-integer program, rules select the dtype alone.
        return
    refused = [
        f"{node.place}: {one.grid.dtype}"
        + (f" in blocks of {one.grid.block}" if one.grid.block else "")
        + (" with zero points" if np.any(one.grid.zero_point) else "")
        for node, _, one in known_operands(deployed)
        if one.grid.block or one.grid.dtype == "uint4" or np.any(one.grid.zero_point)
    ]
    if refused:
        raise ValueError(
            "LiteRT's converter writes symmetric weights with a scale per channel or "
            "tensor: take config.weight_only(bits), or export to a path that ends in "
            ".onnx:\n  " + "\n  ".join(refused)
        )


def check(file: File, deployed: Deployed) -> Report:
    """Compares a file with its program.

    Raises:
        ValueError: if the constants or grids differ, or if the file has float operators
            that no rule allows; the message names them.
    """
    runs_in = _operators_of_weights(file)

    def of_node(node: Node) -> str | None:
        weight = deployed.operands.get(node.outputs[0], {}).get(1)
        if weight is None:
            is_quantized = deployed.program.is_quantized(node)
            return deployed.grids[node.output].dtype if is_quantized else None
        digests = (digest(one) for one in _layouts(node, 1, weight))
        return next((runs_in[one] for one in digests if one in runs_in), None)

    report = Report(file, reported(deployed, of_node))
    _check_floats(report, deployed)
    check_constants(dict(_constants(file)), _operands(deployed))
    check_grids(_grids(file), deployed)
    return report


def _operators_of_weights(file: File) -> dict[bytes, str]:
    """Operators, with the dtypes of their operands, by digest of the weight."""
    dequantized = {
        one.outputs[0].name: one.inputs[0]
        for one in file.operators
        if one.name == "DEQUANTIZE"
    }
    found = {}
    for one in file.operators:
        x, w = (*one.inputs, None, None)[:2]
        if x is None or w is None:
            continue
        stored = dequantized.get(w.name, w)
        if stored is not None and stored.data is not None and stored.scale is not None:
            text = f"{one.name} of {x.dtype} and {w.dtype}"
            found[digest(stored.array())] = text
    return found


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


def _constants(file: File) -> Iterator[tuple[Key, str]]:
    """Yields keys and names of the quantized constants in the file."""
    for tensor in _tensors(file):
        if tensor.data is None or tensor.scale is None:
            continue
        array = tensor.array()
        # The converter gives convolutions without bias a bias of zeros.
        if array.any() or tensor.dtype != "int32":
            yield key_of(array, tensor.scale, tensor.zero_point), tensor.name


def _operands(
    deployed: Deployed,
) -> Iterator[tuple[Node, int, Collection[Key], bool]]:
    for node, position, one in known_operands(deployed):
        scale = np.reshape(one.grid.scale, -1)
        zero_points = np.full(scale.size, one.grid.zero_point)
        layouts = _layouts(node, position, one)
        keys = [key_of(array, scale, zero_points) for array in layouts]
        # LiteRT's converter may fold other known operands.
        is_needed = isinstance(node.operator, Weighted) and bool(one.qvalue.any())
        yield node, position, keys, is_needed


def _grids(file: File) -> Iterator[tuple[str, str, np.ndarray, int]]:
    for one in _tensors(file):
        if one.data is None and one.scale is not None and one.zero_point is not None:
            if len(one.scale) != 1:
                raise ValueError(f"{one.name!r} has a scale for each channel")
            is_shifted = one.dtype == "uint8"  # An input or output of the file.
            dtype = "int8" if is_shifted else one.dtype
            zero_point = int(one.zero_point[0]) - 128 * is_shifted
            yield one.name, dtype, one.scale[0], zero_point


def _tensors(file: File) -> Iterator[Tensor]:
    yield from file.inputs
    for operator in file.operators:
        yield from (t for t in operator.inputs if t is not None)
        yield from operator.outputs


def _layouts(node: Node, position: int, one: Quantized) -> list[np.ndarray]:
    """A known operand with its axes in all orders that a file may have."""
    array = np.asarray(one.qvalue)
    if position == 1 and isinstance(node.operator, Equation):
        array = np.asarray(transposed.dilated(node.operator, position, array))
        out, features, *window = node.operator.params["dimension_numbers"].rhs_spec
        return [array.transpose(out, *window, features)]
    if position != 1 or not isinstance(node.operator, Weighted):
        return [array]
    if isinstance(node.operator, Conv2D):
        # Both, since with one channel a convolution may be depthwise or not.
        return [array.transpose(2, 0, 1, 3), array.transpose(3, 0, 1, 2)]
    return [array.T]
