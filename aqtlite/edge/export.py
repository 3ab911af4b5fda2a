"""Export to an integer file for LiteRT or onnxruntime."""

import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax

from aqtlite.edge.deployed import Deployed, deploy, deploy_as_configured
from aqtlite.edge.grid import Grid
from aqtlite.edge.litert import annotations, check, converter, flatbuffer
from aqtlite.edge.onnx import check as onnx_check
from aqtlite.edge.onnx import write as onnx_write
from aqtlite.edge.publish import publish
from aqtlite.edge.ranges import Ranges
from aqtlite.edge.report import Report
from aqtlite.edge.rules import Rule
from aqtlite.edge.rules import check as check_rules

Interface = Literal["integer", "uint8", "float"]

Target = Callable[[Deployed, Callable[[int], Grid | None]], tuple[bytes, Report]]
"""Function that makes a file of a program; its second argument returns the grid of an
input or output in the file, and None for floats."""


def export(
    model: Any,
    variables: Any,
    ranges: Ranges | None,
    sample_args: Any,
    path: str | pathlib.Path,
    rules: Sequence[Rule] = (),
    *,
    interface: Interface | None = None,
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
        interface: what the model's floating inputs and outputs are in the file:
            "integer" for the integers of their grids, as described by `Report.inputs`
            and `Report.outputs`; "uint8" for those of int8 grids with 128 added, as
            images of cameras are; or "float" for float32. None, the default, is
            "integer" with ranges, and "float" without, where nothing else is possible.

    Returns:
        A report of the file's contents; `print` shows it as a table.

    Raises:
        ModuleNotFoundError: if the extra ``edge``, or ``onnx``, is not installed.
        TypeError: if an argument is of the wrong type.
        ValueError: if `path` has another suffix, if an operation has no integer form,
            if a shape is symbolic, if ranges are missing, if integers are asked of the
            interface of a program in float, or if verification fails. A file that
            existed before is then left unchanged.
    """
    if interface not in (None, *get_args(Interface)):
        raise ValueError(
            f'interface must be "integer", "uint8" or "float", got {interface!r}'
        )
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

    if interface in ("integer", "uint8") and not deployed.grids:
        raise ValueError(_NO_GRIDS.format(interface))

    def grid_of(value: int) -> Grid | None:
        grid = deployed.grids.get(value)
        if grid is None or interface == "float":
            return None
        return grid.in_uint8() if interface == "uint8" else grid

    data, report = TARGETS[path.suffix](deployed, grid_of)
    publish(data, path)
    return report


_NO_GRIDS = (
    "interface={!r} needs ranges, from edge.calibrate, and integer operators: without "
    "them, inputs and outputs are float32 (interface=None). For images in uint8, "
    "export a function that takes them, such as lambda variables, pixels: "
    'model.apply(variables, pixels.astype("float32") / 255), with pixels of uint8 in '
    "sample_args"
)


def _litert(
    deployed: Deployed, grid_of: Callable[[int], Grid | None]
) -> tuple[bytes, Report]:
    check.check_widths(deployed)
    check.check_weights(deployed)
    graph = deployed.program.graph

    def type_of(value: int) -> jax.ShapeDtypeStruct:
        x, grid = graph.values[value], grid_of(value)
        return jax.ShapeDtypeStruct(x.shape, x.dtype if grid is None else grid.dtype)

    data = converter.convert(
        annotations.annotated(deployed, grid_of),
        [type_of(i) for i in graph.inputs],
        *_names(deployed),
    )
    report = check.check(flatbuffer.read(data), deployed)
    converter.check_runs(data)
    return data, report


def _onnx(
    deployed: Deployed, grid_of: Callable[[int], Grid | None]
) -> tuple[bytes, Report]:
    data = onnx_write.write(deployed, grid_of, *_names(deployed))
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
