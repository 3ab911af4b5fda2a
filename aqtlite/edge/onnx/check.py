"""The check of an ONNX file against the program that it is made of.

The file is read anew. Every constant of integers in it is one of the program's, and
every weight, bias and other known operand of the program is in it; every array that it
rounds has the scale and the zero point of a value of the program.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from aqtlite.edge.deployed import Deployed
from aqtlite.edge.grid import Grid
from aqtlite.edge.onnx import runtime
from aqtlite.edge.onnx.write import layout_of
from aqtlite.edge.onnx.writer import package
from aqtlite.edge.report import Report

_Key = tuple[Any, ...]


def check(data: bytes, deployed: Deployed) -> Report:
    """Compares a file with its program; returns what onnxruntime makes of it.

    Raises:
        ModuleNotFoundError: if onnx or onnxruntime is not installed.
        ValueError: if it is another program, or onnxruntime refuses it.
    """
    onnx = package("onnx")
    model = onnx.load_from_string(data)
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ValueError(f"the file is no valid ONNX: {error}") from error
    in_file, in_program = dict(_constants(onnx, model)), dict(_operands(deployed))
    bounds = _bounds(onnx, model)
    for key, path in in_program.items():
        if key not in in_file and key[1] not in bounds:
            raise ValueError(f"the integers of {path} are not in the file")
    for key, name in in_file.items():
        if key not in in_program and not _is_of_ones(key):
            raise ValueError(
                f"the constant {name!r} of the file is none of the program's"
            )
    _check_grids(onnx, model, deployed)
    return Report(runtime.optimized(data))


def _operands(deployed: Deployed) -> Iterator[tuple[_Key, str]]:
    for node in deployed.program.graph.nodes:
        for position, one in deployed.operands.get(node.outputs[0], {}).items():
            qvalue, grid = layout_of(node, position, one)
            zero_point = np.full(np.size(grid.scale), grid.zero_point)
            name = f"operand {position} of {node.place} ({node.operator.name})"
            yield _key(qvalue, grid.scale, zero_point, grid.axis), name


def _constants(onnx: Any, model: Any) -> Iterator[tuple[_Key, str]]:
    """The integers of the file that stand for values."""
    arrays = runtime.constants(onnx, model)
    for node in model.graph.node:
        if node.op_type == "Cast" and node.input[0] in arrays:
            arrays[node.output[0]] = arrays[node.input[0]]
    for name, (scale, zero_point, axis) in runtime.parameters(onnx, model).items():
        if name in arrays:
            higher = _higher(arrays[name].dtype)
            array = arrays[name].astype(np.int64) - higher
            is_per_axis = len(scale) > 1 or arrays[name].dtype == np.int32
            along = axis if is_per_axis else None
            yield _key(array, scale, zero_point - higher, along), name


def _bounds(onnx: Any, model: Any) -> set[bytes]:
    """The integers that others are clipped to."""
    arrays = runtime.constants(onnx, model)
    clips = [node for node in model.graph.node if node.op_type == "Clip"]
    found = [arrays[name] for node in clips for name in node.input[1:] if name]
    return {
        (one.astype(np.int64) - 128).tobytes() for one in found if one.dtype == np.uint8
    }


def _higher(dtype: Any) -> int:
    """Differences of the file's integers from the program's."""
    return 128 if np.dtype(dtype) == np.uint8 else 0


def _key(array: Any, scale: Any, zero_point: Any, axis: int | None) -> _Key:
    return (
        np.shape(array),
        np.asarray(array, np.int64).tobytes(),
        np.asarray(scale, np.float32).tobytes(),
        np.asarray(zero_point, np.int64).tobytes(),
        axis if np.size(scale) > 1 else None,
    )


def _is_of_ones(key: _Key) -> bool:
    """Whether a constant is that of a sum."""
    shape = key[0]
    one = _key(np.ones(shape, np.int64), np.ones(1), np.zeros(1), None)
    return key == one


def _check_grids(onnx: Any, model: Any, deployed: Deployed) -> None:
    wanted = {_of_grid(grid) for grid in deployed.grids.values()}
    arrays = runtime.constants(onnx, model)
    for node in model.graph.node:
        if node.op_type != "QuantizeLinear":
            continue
        scale, zero_point = (arrays[name] for name in node.input[1:])
        found = (
            "int8" if zero_point.dtype == np.uint8 else zero_point.dtype.name,
            scale.tobytes(),
            int(zero_point) - _higher(zero_point.dtype),
        )
        if found not in wanted:
            raise ValueError(
                f"{node.output[0]!r} of the file has scale {scale} and zero point "
                f"{found[2]}, as nothing in the program has"
            )


def _of_grid(grid: Grid) -> _Key:
    scale = np.asarray(grid.scale, np.float32)
    return grid.dtype, scale.tobytes(), int(grid.zero_point)
