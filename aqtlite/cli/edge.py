"""The command ``aqtlite edge``."""

import argparse
import contextlib
import importlib.util
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

import aqtlite
from aqtlite import calibration as calibrations
from aqtlite import config, edge
from aqtlite.checkpoint.load_float import load_float
from aqtlite.checkpoint.variables import tracing_with
from aqtlite.cli import configs, edge_options, factory, output
from aqtlite.cli.examples import Examples
from aqtlite.edge import program
from aqtlite.errors import UserError
from aqtlite.extras import EXTRAS
from aqtlite.flax.nnx.model import QuantizedModel
from aqtlite.jaxpr import tracing

_PACKAGES = {
    ".tflite": ("litert_converter", "ai_edge_litert"),
    ".onnx": ("onnx", "onnxruntime"),
}
"""Packages that write and check a file, by the file's suffix."""

_EXTRAS = {suffix: EXTRAS[packages[0]] for suffix, packages in _PACKAGES.items()}
"""Extras of aqtlite that install these packages."""

_EACH = calibrations.MinMax()
"""Calibration of each batch for ``max``, ``mean`` and ``average``."""

_CALIBRATIONS: dict[str, Callable[..., calibrations.Calibration]] = {
    "max": lambda: calibrations.MaxOverBatches(of=_EACH),
    "mean": lambda: calibrations.MeanOverBatches(of=_EACH),
    "average": lambda decay=0.99: calibrations.MovingAverage(of=_EACH, decay=decay),
    "percentile": lambda percentage: calibrations.PercentileOverBatches(percentage),
    "mse": calibrations.MseOverBatches,
}


def run(args: argparse.Namespace) -> None:
    """Runs ``aqtlite edge``."""
    # The converter does not use oneDNN, but would log a notice about it.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    _check_target(args.target, args.overwrite)
    if args.processors != "any" and args.target.suffix != ".onnx":
        raise UserError("--processors goes with .onnx files")
    calibration, cfg = _calibration(args.calibration), _config(args)
    if args.save_ranges is not None:
        if args.calibrate is None:
            raise UserError("--save-ranges goes with --calibrate")
        output.check_free(args.save_ranges, args.overwrite)
    rules = _rules(args.rules)
    model, sample_args, sample_kwargs = factory.call(
        args.model, factory.find(args.model), None
    )
    _check_model(args.model, model, sample_kwargs)
    examples = None
    if args.calibrate is not None:
        examples = Examples(args.calibrate, sample_args, args.batch_size)
    variables = _float32(
        load_float(args.source, model, sample_args, sample_kwargs, args.subtree)
    )
    function = program.function_of(model, **sample_kwargs)
    _check_traces(model, function, variables, sample_args, sample_kwargs)
    before = sum(x.nbytes for x in jax.tree.leaves(variables))
    with output.errors_in_one_line(ValueError, TypeError, ModuleNotFoundError, OSError):
        ranges = None
        if cfg is not None:
            function, variables = _served(cfg, function, variables, sample_args)
        elif examples is None:
            ranges = edge.Ranges.load(args.ranges)
        else:
            ranges = edge.calibrate(
                function, variables, examples, rules, calibration=calibration
            )
        if args.save_ranges is not None and ranges is not None:
            ranges.save(args.save_ranges)
        with _going_on_from(args.save_ranges):
            report = edge.export(
                function,
                variables,
                ranges,
                sample_args,
                args.target,
                rules,
                interface=args.interface,
                processors=args.processors,
            )
    if args.json:
        output.print_json({"target": str(args.target), **report.to_dict()})
        return
    output.results().print(report)
    share = f", {report.file.size / before:.0%} of the floats" * bool(before)
    print(f"wrote {args.target}: {report.summary()}{share}")


def _config(args: argparse.Namespace) -> config.DotGeneral | None:
    """The config of a file without ranges; None for one with ranges."""
    if args.preset is None and args.config is None:
        return None
    if args.rules is not None:
        raise UserError(
            "--rules select the integers of a file with ranges: give --calibrate or "
            "--ranges in place of --preset or --config"
        )
    if args.config is not None:
        return configs.from_file(args.config)
    return configs.of_preset(args.preset, args.fwd_bits)


def _served(
    cfg: config.DotGeneral, function: Any, variables: Any, args: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Converts a float model for serving, with its weights quantized by a config."""
    rules = [aqtlite.Rule(operands="weight", cfg=cfg)]
    quantized = aqtlite.quantize_function(function, rules, params=0)
    return aqtlite.convert_function(quantized, variables, *args)


def _check_target(target: pathlib.Path, overwrite: bool) -> None:
    if target.suffix not in _PACKAGES:
        raise UserError(
            f"{target} must end in {' or '.join(_PACKAGES)}, which says for which "
            "runtime it is"
        )
    output.check_free(target, overwrite)
    for package in _PACKAGES[target.suffix]:
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"a {target.suffix} file needs the package {package!r}: pip install "
                f"'aqtlite[{_EXTRAS[target.suffix]}]'"
            )


def _check_model(name: str, model: Any, kwargs: Mapping[str, Any]) -> None:
    if not isinstance(model, linen.Module | nnx.Module) or isinstance(
        model, QuantizedModel
    ):
        raise UserError(
            f"--model {name}: a file of integers is made of a float model: return the "
            "module itself, not what quantize_model made of it"
        )
    if any(map(tracing.is_array, jax.tree.leaves(kwargs))):
        raise UserError(
            f"--model {name}: sample_kwargs holds an array; the inputs of a file are "
            "positional arguments"
        )


def _calibration(text: str) -> calibrations.Calibration:
    name, equals, number = text.partition("=")
    make = _CALIBRATIONS.get(name)
    try:
        if make is None:
            raise TypeError
        return make(*([float(number)] if equals else []))
    except TypeError as error:
        raise UserError(
            f"--calibration {text}: write {edge_options.CALIBRATIONS}"
        ) from error
    except ValueError as error:
        raise UserError(f"--calibration {text}: {error}") from error


def _rules(path: pathlib.Path | None) -> tuple[edge.Rule, ...]:
    if path is None:
        return ()
    try:
        return edge.rules.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def _float32(variables: Any) -> Any:
    """Casts floating variables to float32, the dtype of edge programs."""
    return jax.tree.map(
        lambda x: x.astype("float32") if jnp.issubdtype(x.dtype, jnp.floating) else x,
        variables,
    )


def _check_traces(
    model: Any,
    function: Any,
    variables: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Raises UserError if the model itself raises with the sample inputs."""
    flat, inputs = tracing.close_over_constants(
        function, (variables, *args), tracing.is_array
    )
    with tracing_with(model, args, kwargs):
        jax.eval_shape(flat, inputs)


@contextlib.contextmanager
def _going_on_from(ranges: pathlib.Path | None) -> Iterator[None]:
    """Adds a note on how to resume after an interrupt, if ranges are saved."""
    try:
        yield
    except KeyboardInterrupt as error:
        if ranges is not None:
            error.add_note(
                f"The ranges are in {ranges}: --ranges {ranges} in place of "
                "--calibrate and --save-ranges goes on from there"
            )
        raise
