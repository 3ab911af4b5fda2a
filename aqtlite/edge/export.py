"""Export to an integer file for LiteRT or onnxruntime."""

import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from aqtlite.edge.deployed import Deployed, deploy, deploy_as_configured
from aqtlite.edge.litert import annotations, check, converter, flatbuffer
from aqtlite.edge.onnx import check as onnx_check
from aqtlite.edge.onnx import write as onnx_write
from aqtlite.edge.publish import publish
from aqtlite.edge.ranges import Ranges
from aqtlite.edge.report import Report
from aqtlite.edge.rules import Rule
from aqtlite.edge.rules import check as check_rules

Interface = Literal["integer", "float"]

Target = Callable[[Deployed, Callable[[int], bool]], tuple[bytes, Report]]
"""Function that makes a file of a program; its second argument tells of an input or
output whether it is an integer in the file."""


def export(
    model: Any,
    variables: Any,
    ranges: Ranges | None,
    sample_args: Any,
    path: str | pathlib.Path,
    rules: Sequence[Rule] = (),
    *,
    interface: Interface = "integer",
) -> Report:
    """Writes a model file, with constants quantized by this library.

    With ranges, the file is a full-integer one. Without (None), its activations are
    float32, and contractions run as the configs of a model converted for serving say:
    with the frozen weights alone (`config.weight_only`), or with activations that the
    runtime quantizes by their own range at each call (such as `config.qat`). A float
    model gives a float file.

    The file is read back before it is published, and each of its integers, scales and
    zero points is verified. A LiteRT file has no float operator unless a rule allows
    it. For an ONNX file (with QuantizeLinear and DequantizeLinear), the report lists
    the operators that onnxruntime runs, and `Report.float_operators` those that it
    leaves in float.

    Args:
        model: a Linen module, an NNX module, or a function of variables and arguments.
        variables: variables of the model; serving variables of a quantized one.
        ranges: ranges of the model's values, from `calibrate`; None for float
            activations, without rules.
        sample_args: arguments of the model, a tuple or a single one, or their shapes
            (`jax.ShapeDtypeStruct`). The file has these fixed shapes.
        path: path of the file, ending in ".tflite" for LiteRT or ".onnx" for
            onnxruntime.
        rules: rules that select the integers of each operator.
        interface: "integer" if the model's floating inputs and outputs are integers in
            the file, as described by `Report.inputs` and `Report.outputs`; "float" if
            they stay float32, as they always do without ranges.

    Returns:
        A report of the file's contents; `print` shows it as a table.

    Raises:
        ModuleNotFoundError: if the extra ``edge``, or ``onnx``, is not installed.
        TypeError: if an argument is of the wrong type.
        ValueError: if `path` has another suffix, if an operation has no integer form,
            if a shape is symbolic, if ranges are missing, or if verification fails. A
            file that existed before is then left unchanged.
    """
    if interface not in ("integer", "float"):
        raise ValueError(f'interface must be "integer" or "float", got {interface!r}')
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"path must name a file, got {type(path).__name__}: several inputs of the "
            "model are one argument, a tuple"
        )
    path = pathlib.Path(path)
    if path.suffix not in TARGETS:
        raise ValueError(
            f"path must end in {' or '.join(TARGETS)}, which say for which runtime the "
            f"file is, got {str(path)!r}"
        )
    args = sample_args if isinstance(sample_args, tuple) else (sample_args,)
    _check_shapes(args)
    if ranges is not None:
        deployed = deploy(model, variables, ranges, args, rules)
    elif all(rule.is_float for rule in check_rules(rules)):
        deployed = deploy_as_configured(model, variables, args)
    else:
        raise ValueError(
            "rules select the integers of a full-integer file, which needs ranges from "
            "edge.calibrate, and ranges is None"
        )

    def is_integer(value: int) -> bool:
        return interface == "integer" and value in deployed.grids

    data, report = TARGETS[path.suffix](deployed, is_integer)
    publish(data, path)
    return report


def _litert(
    deployed: Deployed, is_integer: Callable[[int], bool]
) -> tuple[bytes, Report]:
    check.check_widths(deployed)
    check.check_weights(deployed)
    graph, grids = deployed.program.graph, deployed.grids

    def type_of(value: int) -> jax.ShapeDtypeStruct:
        x = graph.values[value]
        dtype = grids[value].dtype if is_integer(value) else x.dtype
        return jax.ShapeDtypeStruct(x.shape, dtype)

    data = converter.convert(
        annotations.annotated(deployed, is_integer),
        [type_of(i) for i in graph.inputs],
        *_names(deployed),
    )
    report = check.check(flatbuffer.read(data), deployed)
    converter.check_runs(data)
    return data, report


def _onnx(
    deployed: Deployed, is_integer: Callable[[int], bool]
) -> tuple[bytes, Report]:
    data = onnx_write.write(deployed, is_integer, *_names(deployed))
    return data, onnx_check.check(data, deployed)


TARGETS: dict[str, Target] = {".tflite": _litert, ".onnx": _onnx}
"""Functions that make files, by suffix of the path."""


def _names(deployed: Deployed) -> tuple[list[str], list[str]]:
    """Names of the file's inputs and outputs."""
    graph, names = deployed.program.graph, deployed.program.names
    return (
        [names[i].replace("/", "_") for i in graph.inputs],
        [f"output_{i}" if i else "output" for i in range(len(graph.outputs))],
    )


def _check_shapes(args: tuple[Any, ...]) -> None:
    for leaf in jax.tree.leaves(args):
        for size in getattr(leaf, "shape", ()):
            if not isinstance(size, int):
                raise ValueError(
                    f"a sample argument has the shape {leaf.shape}, of which {size} is "
                    "symbolic: a file is for one shape, since reshapes in it hold "
                    "sizes. Export a file for each size of a batch that you need"
                )
            if size == 0:
                raise ValueError(
                    f"a sample argument is empty, of shape {leaf.shape}: a file is for "
                    "one shape, which has elements"
                )
