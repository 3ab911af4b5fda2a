"""Verification of an ONNX file against its program."""

from collections.abc import Collection, Iterator
from typing import Any

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
from aqtlite.edge.onnx import images, runtime
from aqtlite.edge.onnx.write import layout_of
from aqtlite.edge.operators.base import Equation
from aqtlite.edge.report import File, Processors, Report, Tensor
from aqtlite.extras import package


def check(data: bytes, deployed: Deployed, processors: Processors) -> Report:
    """Compares a file with its program; reports the operators that onnxruntime runs.

    Args:
        data: bytes of the file.
        deployed: the program.
        processors: those that the file was written for.

    Raises:
        ModuleNotFoundError: if onnx or onnxruntime is not installed.
        OSError: if there is no room for a temporary file of the same size.
        ValueError: if the constants or grids differ, or onnxruntime refuses the file.
    """
    onnx = package("onnx")
    model = onnx.load_from_string(data)
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ValueError(f"the file is no valid ONNX: {error}") from error
    constants = dict(_constants(onnx, model))
    check_constants(constants, _operands(deployed, _bounds(onnx, model)))
    check_grids(_grids(onnx, model), deployed)
    file = runtime.optimized(data)

    def runs_in(node: Node) -> str | None:
        return _runs_in(file, deployed.program.names[node.output])

    return Report(file, reported(deployed, runs_in), processors)


def _runs_in(file: File, name: str) -> str | None:
    """The operator that onnxruntime runs for a contraction, None if it is not found.

    Fused operators keep the name of their output or of their weight.
    """

    def is_of_it(tensor: Tensor | None) -> bool:
        found = "" if tensor is None else tensor.name
        return found == name or found.startswith(f"{name}/")

    for one in file.operators:
        if not any(kind in one.name for kind in ("MatMul", "Gemm", "Conv")):
            continue
        weights = [t for t in one.inputs[1:] if t is not None and t.data is not None]
        if any(map(is_of_it, (*one.outputs, *weights))):
            return one.name
    return None


def _operands(
    deployed: Deployed, bounds: set[bytes]
) -> Iterator[tuple[Node, int, Collection[Key], bool]]:
    for node, position, one in known_operands(deployed):
        operator = node.operator
        if isinstance(operator, Equation) and not images.takes_frozen(operator, one):
            continue
        qvalue, grid = layout_of(node, position, one)
        zero_point = np.broadcast_to(grid.zero_point, np.shape(grid.scale)).reshape(-1)
        key = _key(qvalue, grid.scale, zero_point, grid.axis)
        yield node, position, [key], digest(qvalue) not in bounds


def _constants(onnx: Any, model: Any) -> Iterator[tuple[Key, str]]:
    """Yields keys and names of the quantized constants in the file."""
    arrays, complements = runtime.constants(onnx, model), set()
    for node in model.graph.node:
        if node.op_type in ("Cast", "BitwiseNot") and node.input[0] in arrays:
            arrays[node.output[0]] = arrays[node.input[0]]
        if node.op_type == "BitwiseNot":
            complements.add(node.output[0])
    for name, (scale, zero_point, axis) in runtime.parameters(onnx, model).items():
        if name in arrays:
            higher = _higher(arrays[name].dtype)
            array = arrays[name].astype(np.int32) - higher
            if name in complements:
                # The subtrahend of a difference, which is written as a sum.
                zero_point = 255 - zero_point
            is_per_axis = len(scale) > 1 or arrays[name].dtype == np.int32
            along = axis if is_per_axis else None
            # Sums are written as products with ones, which the program does not have.
            is_of_ones = bool((array == 1).all() and (scale == 1).all())
            if not is_of_ones or zero_point.any():
                yield _key(array, scale, zero_point - higher, along), name


def _bounds(onnx: Any, model: Any) -> set[bytes]:
    """Digests of the integers that are bounds of clips."""
    arrays = runtime.constants(onnx, model)
    clips = [node for node in model.graph.node if node.op_type == "Clip"]
    found = [arrays[name] for node in clips for name in node.input[1:] if name]
    return {digest(one.astype(int) - 128) for one in found if one.dtype == np.uint8}


def _higher(dtype: Any) -> int:
    """Offset of the file's integers from the program's (`writer.stored_grid`)."""
    return 128 if np.dtype(dtype) == np.uint8 else 0


def _key(array: Any, scale: Any, zero_point: Any, axis: int | None) -> Key:
    along = axis if np.size(scale) > 1 else None
    return key_of(array, scale, zero_point, np.shape(array), along)


def _grids(onnx: Any, model: Any) -> Iterator[tuple[str, str, np.ndarray, int]]:
    arrays = runtime.constants(onnx, model)
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear":
            scale, zero_point = (arrays[name] for name in node.input[1:])
            dtype = "int8" if zero_point.dtype == np.uint8 else zero_point.dtype.name
            lower = int(zero_point) - _higher(zero_point.dtype)
            yield node.output[0], dtype, scale, lower
