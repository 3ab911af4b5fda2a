"""Export of several functions to one LiteRT file, with their weights stored once."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from aqtlite.edge.export import (
    Interface,
    check_interface,
    check_path,
    deployed_of,
    interface_of,
)
from aqtlite.edge.litert import write
from aqtlite.edge.publish import making, publish
from aqtlite.edge.ranges import Ranges
from aqtlite.edge.report import Report
from aqtlite.edge.rules import Rule


@dataclasses.dataclass(frozen=True, eq=False)
class Signature:
    """A function of a file with several; the fields are arguments of `edge.export`."""

    model: Any
    """A Linen module, an NNX module, or a function of variables and arguments."""

    variables: Any
    """Variables of the model; serving variables of a quantized one."""

    ranges: Ranges | None
    """Ranges of the values, from `edge.calibrate` of this model; None for float
    activations."""

    sample_args: Any
    """Arguments of the model, a tuple or a single one, or their shapes."""

    rules: Sequence[Rule] = ()
    """Rules that select the integers of each operator."""


def export_signatures(
    signatures: Mapping[str, Signature],
    path: str | pathlib.Path,
    *,
    interface: Interface | None = None,
) -> dict[str, Report]:
    """Writes several functions to a LiteRT file, such as the steps of a language model.

    Weights with equal integers and scales, and other equal constants, are stored once.
    Each function is verified like that of a file with one (`edge.export`).

    Args:
        signatures: the functions, by the names of their signatures in the file.
        path: path of the file, ending in ".tflite".
        interface: inputs and outputs in the file, as for `edge.export`.

    Returns:
        A report of each function, by name; the sizes in them are of the whole file.

    Raises:
        ModuleNotFoundError: if the extra ``edge`` is not installed.
        OSError: if there is no room for the file, or it cannot be written.
        TypeError: if an argument is of the wrong type.
        ValueError: if `path` is for onnxruntime, an address or a symbolic link, if
            there is no signature, or where `edge.export` raises it; the message then
            begins with the name of the signature.
    """
    if pathlib.Path(path).suffix == ".onnx":
        raise ValueError(
            "an ONNX file has one graph, and no signatures: export each function to a "
            "file of its own by edge.export, or to a path that ends in .tflite"
        )
    check_path(path, (".tflite",))
    check_interface(interface)
    if not signatures:
        raise ValueError("there is no signature to export")
    programs: dict[str, write.Given] = {}
    for name, one in signatures.items():
        if not isinstance(name, str) or not isinstance(one, Signature):
            raise TypeError(
                "signatures must be a dictionary of edge.Signature by name, got "
                f"{name!r}: {type(one).__name__}"
            )
        try:
            deployed = deployed_of(
                one.model, one.variables, one.ranges, one.sample_args, one.rules
            )
            programs[name] = deployed, interface_of(deployed, interface)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    with making(path):
        data, reports = write.write(programs)
    publish(data, path)
    return reports
