"""Export to a file of integers: for LiteRT, or for onnxruntime."""

import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from aqtlite.edge.deployed import Deployed, deploy
from aqtlite.edge.litert import annotations, check, converter, flatbuffer
from aqtlite.edge.onnx import check as onnx_check
from aqtlite.edge.onnx import write as onnx_write
from aqtlite.edge.publish import publish
from aqtlite.edge.ranges import Ranges
from aqtlite.edge.report import Report
from aqtlite.edge.rules import Rule

Interface = Literal["integer", "float"]

Target = Callable[[Deployed, Callable[[int], bool]], tuple[bytes, Report]]
"""Makes a file of a program; told which inputs and outputs are integers."""


def export(
    model: Any,
    variables: Any,
    ranges: Ranges,
    sample_args: Any,
    path: str | pathlib.Path,
    rules: Sequence[Rule] = (),
    *,
    interface: Interface = "integer",
) -> Report:
    """Writes a model into a file whose integers are those of this library.

    A path that ends in ".tflite" makes a LiteRT file; one that ends in ".onnx" an ONNX
    file with QuantizeLinear and DequantizeLinear, for onnxruntime. The file is read
    back before it takes its place: every integer, scale and zero point is compared. No
    operator of floats is in a LiteRT file unless a rule allows it. Of an ONNX file, the
    report has the operators that onnxruntime runs, and `Report.float_operators` those
    that it leaves in float.

    Args:
        model: a Linen module, an NNX module, or a function of variables and arguments.
        variables: variables of the model.
        ranges: ranges of the model's values, as `calibrate` finds them.
        sample_args: arguments of the model, a tuple or a single one, or shapes of them
            (`jax.ShapeDtypeStruct`). The file is for these shapes.
        path: path of the file; its suffix says for which runtime it is.
        rules: integers of each operator.
        interface: whether floating inputs and outputs of the model are integers of the
            file ("integer"), which `Report.inputs` and `Report.outputs` describe, or
            stay float32 ("float").

    Returns:
        What is in the file; `print` shows it as a table.

    Raises:
        ModuleNotFoundError: if the extra ``edge``, or ``onnx``, is not installed.
        TypeError: if an argument is of another type.
        ValueError: if `path` has another suffix, if an operation has no integer form,
            if a shape is symbolic, if ranges are missing, or if the file is not what
            was asked for. There is no file then, or that which was there before.
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
    deployed = deploy(model, variables, ranges, args, rules)

    def is_integer(value: int) -> bool:
        return interface == "integer" and value in deployed.grids

    data, report = TARGETS[path.suffix](deployed, is_integer)
    publish(data, path)
    return report


def _litert(
    deployed: Deployed, is_integer: Callable[[int], bool]
) -> tuple[bytes, Report]:
    check.check_widths(deployed)
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
"""What makes a file, by the suffix of its path."""


def _names(deployed: Deployed) -> tuple[list[str], list[str]]:
    """The names of the file's inputs and outputs."""
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
