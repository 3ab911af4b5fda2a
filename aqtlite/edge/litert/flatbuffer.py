"""Reading of the operators and tensors of a LiteRT file."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from aqtlite.edge.report import File, FileOperator, Tensor
from aqtlite.extras import package


def read(data: bytes, signature: str | None = None) -> File:
    """Reads the operators of one signature of a LiteRT file.

    Args:
        data: bytes of the file.
        signature: name of the signature; None for the first.

    Raises:
        ModuleNotFoundError: if the LiteRT runtime, which has the schema, is missing.
        ValueError: if `data` is not a LiteRT file.
    """
    schema = package("ai_edge_litert.schema_py_generated")
    if data[4:8] != b"TFL3":
        raise ValueError("this is no LiteRT file: it does not begin with TFL3")
    model = schema.ModelT.InitFromPackedBuf(data, 0)
    names = _names(schema.BuiltinOperator)
    types = {number: name.lower() for number, name in _names(schema.TensorType).items()}
    signatures = {one.signatureKey.decode(): one for one in model.signatureDefs or ()}
    found = signatures.get(signature or next(iter(signatures), ""))
    graph = model.subgraphs[0 if found is None else found.subgraphIndex]
    tensors = [_tensor(one, model.buffers, types) for one in graph.tensors]
    # Runtimes use the names of the signature. An input that is returned has two.
    sides = ((), ()) if found is None else (found.inputs, found.outputs)
    of_inputs, of_outputs = (
        {one.tensorIndex: one.name.decode() for one in side} for side in sides
    )

    def named(index: int, names: Mapping[int, str]) -> Tensor:
        known = tensors[index]
        return dataclasses.replace(known, name=names.get(index, known.name))

    tensors = [named(i, {**of_outputs, **of_inputs}) for i in range(len(tensors))]
    operators = []
    for one in graph.operators:
        code = model.operatorCodes[one.opcodeIndex]
        number = max(code.builtinCode, code.deprecatedBuiltinCode)
        operators.append(
            FileOperator(
                names[number],
                tuple(tensors[i] if i >= 0 else None for i in one.inputs),
                tuple(tensors[i] for i in one.outputs),
            )
        )
    return File(
        tuple(operators),
        tuple(named(i, of_inputs) for i in graph.inputs),
        tuple(named(i, of_outputs) for i in graph.outputs),
        len(data),
    )


def _names(enumeration: Any) -> dict[int, str]:
    return {
        number: name
        for name, number in vars(enumeration).items()
        if isinstance(number, int) and not name.startswith("_")
    }


def _tensor(one: Any, buffers: list[Any], types: dict[int, str]) -> Tensor:
    scale = zero_point = None
    axis = 0
    if one.quantization is not None and one.quantization.scale is not None:
        scale = np.asarray(one.quantization.scale, np.float32)
        zero_point = np.asarray(one.quantization.zeroPoint, np.int64)
        axis = one.quantization.quantizedDimension
    content = buffers[one.buffer].data
    return Tensor(
        one.name.decode() if one.name else "",
        tuple(int(n) for n in (one.shape if one.shape is not None else ())),
        types[one.type],
        scale,
        zero_point,
        axis,
        None if content is None or not len(content) else bytes(content),
    )
