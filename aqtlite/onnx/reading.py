"""Reading of ONNX files: what is checked before a graph is made."""

import copy
import dataclasses
import importlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from aqtlite.extras import package
from aqtlite.onnx import registry
from aqtlite.onnx.checking import check
from aqtlite.onnx.graph import Graph
from aqtlite.onnx.importing import Importer, walk

_OLDEST_OPSET = 7
"""Before, elementwise operators broadcast by attributes."""

_ADVICE = {
    "ai.onnx.ml": "leave classical estimators out of the exported network",
    "com.microsoft": "export the network without optimization by onnxruntime",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """An `onnx.ModelProto`, and the folder of its external data."""

    proto: Any
    directory: str


def read(model: Any) -> Source:
    """Reads a file, or takes an `onnx.ModelProto`.

    Raises:
        ModuleNotFoundError: if the package onnx is not installed.
        FileNotFoundError: if the file is missing.
        TypeError: if it is neither a path nor an `onnx.ModelProto`.
        ValueError: if the file is no ONNX file.
    """
    onnx = package("onnx")
    if isinstance(model, onnx.ModelProto):
        return Source(_inlined(model), "")
    if not isinstance(model, str | os.PathLike):
        raise TypeError(
            "the model is a path of an ONNX file, or an onnx.ModelProto; got "
            f"{type(model).__name__}"
        )
    path = os.fspath(model)
    protobuf = importlib.import_module("google.protobuf.message")  # onnx needs it.
    try:
        proto = onnx.load(path, load_external_data=False)
    except protobuf.DecodeError as error:
        raise ValueError(f"{path} is no ONNX file, or is cut off: {error}") from error
    if not proto.graph.node and not proto.graph.output:
        raise ValueError(f"{path} is no ONNX file: it has no graph")
    if not proto.opset_import:
        raise ValueError(
            f"{path} is no ONNX file, or is cut off: it has no versions of operators "
            "(opset_import)"
        )
    directory = os.path.dirname(os.path.abspath(path))
    return Source(_inlined(proto), directory)


def _inlined(proto: Any) -> Any:
    """Replaces calls of functions that the file itself defines."""
    if not proto.functions:
        return proto
    return package("onnx.inliner").inline_local_functions(proto)


def graph_of(
    source: Source, constants: Mapping[str, Any]
) -> tuple[Graph, dict[str, np.ndarray]]:
    """Returns the graph of a model, and its parameters.

    Raises:
        ValueError: if operators are unknown or too old, nodes are malformed, or a
            constant is no input.
    """
    opsets: dict[str, int] = {}
    for one in source.proto.opset_import:
        opsets[registry.DOMAINS.get(one.domain, one.domain)] = one.version
    if opsets.get("", _OLDEST_OPSET) < _OLDEST_OPSET:
        raise ValueError(
            f"the network has operators of version {opsets['']} (opset), and the "
            f"oldest that is supported is {_OLDEST_OPSET}: "
            "onnx.version_converter.convert_version makes it a newer one"
        )
    model = source.proto
    check(model.graph, opsets)
    if _unknown(model):
        model = _expanded(model)
    unknown = _unknown(model)
    if unknown:
        raise _unsupported(unknown, opsets)
    known = _constants(model.graph, constants)
    importer = Importer(opsets, source.directory)
    return importer.graph(model.graph, known, {}), importer.parameters


def _unknown(model: Any) -> list[Any]:
    """Nodes whose operators are not registered."""
    return [
        node
        for node in walk(model.graph.node)
        if node.op_type != "Constant" and not registry.has(node.domain, node.op_type)
    ]


def _expanded(model: Any) -> Any:
    """Replaces operators that ONNX defines by others, where none is registered."""
    onnx = package("onnx")
    model = copy.deepcopy(model)
    names = set()
    for node in _unknown(model):
        if onnx.defs.has(node.op_type, domain=node.domain):
            schema = onnx.defs.get_schema(node.op_type, domain=node.domain)
            if schema.has_function or schema.has_context_dependent_function:
                names.add((node.domain, node.op_type))
                _fill(node, schema)
    inline = package("onnx.inliner").inline_selected_functions
    try:
        return inline(model, sorted(names), inline_schema_functions=True)
    except RuntimeError:  # Of missing optional inputs; the operator is unknown then.
        return model


def _fill(node: Any, schema: Any) -> None:
    """Writes the defaults of attributes, which the inliner leaves out."""
    given = {one.name for one in node.attribute}
    for name, attribute in schema.attributes.items():
        if name not in given and attribute.default_value.name:
            node.attribute.append(attribute.default_value)


def _unsupported(nodes: list[Any], opsets: Mapping[str, int]) -> ValueError:
    found = {(node.domain, node.op_type): node for node in reversed(nodes)}
    lines = [
        f"{name} (domain {domain or 'ai.onnx'}, opset {opsets.get(domain, '?')}, node "
        f"{node.name or node.output[0]!r})"
        for (domain, name), node in sorted(found.items(), key=lambda item: item[0])
    ]
    domains = {domain for domain, _ in found}
    advice = [text for domain, text in _ADVICE.items() if domain in domains]
    advice.append("register a function of JAX by aqtlite.onnx.operator")
    return ValueError(
        "the network has operators that aqtlite.onnx does not know: "
        f"{', '.join(lines)}; {', or '.join(advice)}"
    )


def _constants(proto: Any, constants: Mapping[str, Any]) -> dict[str, np.ndarray]:
    inputs = {one.name: one for one in proto.input}
    known = {}
    for name, value in constants.items():
        if name not in inputs:
            raise ValueError(
                f"constants has {name!r}, which is no input of the network; its inputs "
                f"are {', '.join(inputs)}"
            )
        _, dtype = shape_and_dtype(inputs[name])
        known[name] = np.asarray(value, dtype)
    return known


def shape_and_dtype(
    proto: Any,
) -> tuple[tuple[int | str | None, ...] | None, np.dtype[Any] | None]:
    """Returns what an `onnx.ValueInfoProto` declares; None for what it leaves open."""
    onnx = package("onnx")
    if proto.type.WhichOneof("value") is None:
        return None, None
    if not proto.type.HasField("tensor_type"):
        raise ValueError(
            f"{proto.name!r} is a sequence, an optional value or a map: only arrays "
            "are supported as inputs and outputs of a network"
        )
    tensor = proto.type.tensor_type
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    if not tensor.HasField("shape"):
        return None, dtype
    return tuple(_size(one) for one in tensor.shape.dim), dtype


def _size(proto: Any) -> int | str | None:
    if proto.HasField("dim_value") and proto.dim_value >= 0:
        return int(proto.dim_value)
    name = proto.dim_param
    return name if name not in ("", "?", "-1") else None
