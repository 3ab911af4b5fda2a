"""Export to an integer file for LiteRT or onnxruntime."""

import os
import pathlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, get_args

import jax

from aqtlite.edge.deployed import Deployed, deploy, deploy_as_configured
from aqtlite.edge.grid import Grid
from aqtlite.edge.litert import converter
from aqtlite.edge.litert import write as litert_write
from aqtlite.edge.onnx import check as onnx_check
from aqtlite.edge.onnx import write as onnx_write
from aqtlite.edge.publish import making, publish
from aqtlite.edge.ranges import Ranges
from aqtlite.edge.report import Processors, Report
from aqtlite.edge.rules import Rule
from aqtlite.edge.rules import check as check_rules
from aqtlite.output.files import check_target

Interface = Literal["integer", "uint8", "float"]

Target = Callable[
    [Deployed, Callable[[int], Grid | None], Processors], tuple[bytes, Report]
]
"""Function that makes a file of a program, for some processors; its second argument
returns the grid of an input or output in the file, and None for floats."""


def export(
    model: Any,
    variables: Any,
    ranges: Ranges | None,
    sample_args: Any,
    path: str | pathlib.Path,
    rules: Sequence[Rule] = (),
    *,
    interface: Interface | None = None,
    processors: Processors = "any",
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
        processors: where the results of an ONNX file have to be right. With "any", the
            default, weights of 8 bits are stored as uint8. With "vnni" they are int8:
            products take 0.4 to 0.8 of the time on x86-64 with AVX512-VNNI or AVX-VNNI,
            but on x86-64 without them onnxruntime adds pairs of products in 16 bits,
            and results are far off.

    Returns:
        A report of the file's contents; `print` shows it as a table.

    Raises:
        ModuleNotFoundError: if the extra ``edge``, or ``onnx``, is not installed.
        OSError: if there is no room for the file, or it cannot be written.
        TypeError: if an argument is of the wrong type.
        ValueError: if `path` has another suffix, is an address such as
            ``gs://bucket/m.onnx`` or a symbolic link, if an operation has no integer
            form, if a shape is symbolic, if ranges are missing, if integers are asked
            of the interface of a program in float, if `processors` is given for a
            LiteRT file, or if verification fails. A file that existed before is then
            left unchanged.
    """
    check_interface(interface)
    check_path(path, TARGETS)
    path = pathlib.Path(path)
    _check_processors(processors, path)
    deployed = deployed_of(model, variables, ranges, sample_args, rules)
    grid_of = interface_of(deployed, interface)
    with making(path):
        data, report = TARGETS[path.suffix](deployed, grid_of, processors)
    publish(data, path)
    return report


def check_interface(interface: Any) -> None:
    """Raises ValueError if an interface is unknown."""
    if interface not in (None, *get_args(Interface)):
        raise ValueError(
            f'interface must be "integer", "uint8" or "float", got {interface!r}'
        )


def _check_processors(processors: Any, path: pathlib.Path) -> None:
    """Raises ValueError if processors are unknown, or a file is for all of them."""
    if processors not in get_args(Processors):
        raise ValueError(f'processors must be "any" or "vnni", got {processors!r}')
    if processors != "any" and path.suffix != ".onnx":
        raise ValueError(
            f"processors={processors!r} is for .onnx files, and {path.name} is not: "
            "LiteRT's results are right on all processors. Leave it out"
        )


def check_path(path: Any, suffixes: Collection[str]) -> None:
    """Raises TypeError or ValueError if no file can be written to a path."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"path must name a file, got {type(path).__name__}: several inputs of the "
            "model are one argument, a tuple"
        )
    check_target(path)
    if pathlib.Path(path).suffix not in suffixes:
        raise ValueError(
            f"path must end in {' or '.join(suffixes)}, which say for which runtime "
            f"the file is, got {str(path)!r}"
        )


def deployed_of(
    model: Any,
    variables: Any,
    ranges: Ranges | None,
    sample_args: Any,
    rules: Sequence[Rule],
) -> Deployed:
    """Makes a program of a model, with the arguments of `export`."""
    args = sample_args if isinstance(sample_args, tuple) else (sample_args,)
    _check_shapes(args)
    if ranges is not None:
        return deploy(model, variables, ranges, args, rules)
    if all(rule.is_float for rule in check_rules(rules)):
        return deploy_as_configured(model, variables, args)
    raise ValueError(
        "rules select the integers of a full-integer file, which needs ranges from "
        "edge.calibrate, and ranges is None"
    )


def interface_of(
    deployed: Deployed, interface: Interface | None
) -> Callable[[int], Grid | None]:
    """A function that returns the grid of an input or output in the file, or None.

    Raises:
        ValueError: if the interface has integers, and the program is in float.
    """
    if interface in ("integer", "uint8") and not deployed.grids:
        raise ValueError(_NO_GRIDS.format(interface))

    def grid_of(value: int) -> Grid | None:
        grid = deployed.grids.get(value)
        if grid is None or interface == "float":
            return None
        return grid.in_uint8() if interface == "uint8" else grid

    return grid_of


_NO_GRIDS = (
    "interface={!r} needs ranges, from edge.calibrate, and integer operators: without "
    "them, inputs and outputs are float32 (interface=None). For images in uint8, "
    "export a function that takes them, such as lambda variables, pixels: "
    'model.apply(variables, pixels.astype("float32") / 255), with pixels of uint8 in '
    "sample_args"
)


def _litert(
    deployed: Deployed, grid_of: Callable[[int], Grid | None], processors: Processors
) -> tuple[bytes, Report]:
    del processors
    data, reports = litert_write.write({converter.SIGNATURE: (deployed, grid_of)})
    return data, reports[converter.SIGNATURE]


def _onnx(
    deployed: Deployed, grid_of: Callable[[int], Grid | None], processors: Processors
) -> tuple[bytes, Report]:
    data = onnx_write.write(deployed, grid_of, *deployed.names(), processors)
    return data, onnx_check.check(data, deployed, processors)


TARGETS: dict[str, Target] = {".tflite": _litert, ".onnx": _onnx}
"""Functions that make files, by suffix of the path."""


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
