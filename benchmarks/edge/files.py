"""Files of a trained model: float, and integer files by aqtlite and Qwix."""

import dataclasses
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from aqtlite import edge
from aqtlite.edge.grid import Quantized
from aqtlite.edge.litert import converter, flatbuffer
from aqtlite.edge.report import Report
from benchmarks.edge.training import Trained
from benchmarks.harness.peers import qwix

BATCH = 64
SIZES = (1, 32)
"""Batch sizes to make files for."""

QWIX_RULES = [qwix.QuantizationRule(weight_qtype=jnp.int8, act_qtype=jnp.int8)]


@dataclasses.dataclass(frozen=True)
class Files:
    """The files of a model by one library."""

    data: Mapping[int, bytes]
    """Contents of the files, by batch size."""

    predict: Callable[[Any], Any] | None
    """Prediction in JAX of the file for the largest batch, from floats to floats."""


def of_floats(trained: Trained, images: Any) -> Files:
    """Converts the float model."""
    shape = images.shape[1:]
    return Files({n: _convert(trained, n, shape) for n in SIZES}, None)


def by_aqtlite(trained: Trained, images: Any, interface: str) -> Files:
    """Calibrates and exports with aqtlite."""
    model, variables = trained.model, trained.variables
    ranges = edge.calibrate(model, variables, list(_batches(images)))
    data = {}
    for n in SIZES:
        x = jax.ShapeDtypeStruct((n, *images.shape[1:]), "float32")
        data[n] = _exported(model, variables, ranges, x, interface)
    simulation = edge.simulate(model, variables, ranges, x)
    run = jax.jit(simulation.__call__)
    (number,) = simulation.deployed.program.graph.outputs
    grid = simulation.deployed.grids[number]
    return Files(data, lambda x: Quantized(run(x), grid).dequant())


def _exported(
    model: Any, variables: Any, ranges: edge.Ranges, x: Any, interface: Any
) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "model.tflite")
        edge.export(model, variables, ranges, x, path, interface=interface)
        return path.read_bytes()


def by_qwix(trained: Trained, images: Any) -> Files:
    """Calibrates and converts with Qwix's providers for on-device models."""
    make = _qwix_linen if isinstance(trained.model, nn.Module) else _qwix_nnx
    converted = make(trained, images)
    shape = images.shape[1:]
    # Not in jax.jit, where the converted model's values differ from the file's.
    return Files({n: _convert(converted, n, shape) for n in SIZES}, converted)


def _qwix_linen(trained: Trained, images: Any) -> Callable[[Any], Any]:
    model, variables = trained.model, trained.variables
    observed = qwix.quantize_model(model, qwix.OdmlQatProvider(QWIX_RULES))
    stats: dict[str, Any] = {}
    for x in _batches(images):
        _, stats = observed.apply({**variables, **stats}, x, mutable=["quant_stats"])
    provider = qwix.OdmlConversionProvider(
        QWIX_RULES, variables["params"], stats["quant_stats"]
    )
    converted = qwix.quantize_model(model, provider)
    return lambda x: converted.apply(variables, x)


def _qwix_nnx(trained: Trained, images: Any) -> Callable[[Any], Any]:
    first = next(_batches(images))
    provider = qwix.OdmlQatProvider(QWIX_RULES)
    observed = qwix.quantize_model(trained.model, provider, first)
    for x in _batches(images):
        observed(x)
    params = nnx.to_pure_dict(nnx.state(trained.model, nnx.Param))
    stats = nnx.to_pure_dict(nnx.state(observed, nnx.Not(nnx.Param)))
    provider = qwix.OdmlConversionProvider(QWIX_RULES, params, stats)
    return qwix.quantize_model(trained.model, provider, first)


def _batches(images: Any) -> Iterator[jax.Array]:
    for start in range(0, len(images) - BATCH + 1, BATCH):
        yield jnp.asarray(images[start : start + BATCH])


def _convert(function: Callable[[Any], Any], size: int, shape: Any) -> bytes:
    x = jax.ShapeDtypeStruct((size, *shape), "float32")
    one = converter.Function(lambda x: [function(x)], [x], ["input"], ["output"])
    return converter.convert({converter.SIGNATURE: one})


_AT_THE_ENDS = ("QUANTIZE", "DEQUANTIZE")


def float_operators(data: bytes) -> list[str]:
    """The names of the float operators, without casts."""
    found = Report(flatbuffer.read(data)).float_operators
    return [one.name for one in found if one.name not in _AT_THE_ENDS]


def operators(data: bytes) -> int:
    """The number of operators in a file, including casts."""
    return len(flatbuffer.read(data).operators)


def output_scale(data: bytes) -> float | None:
    """The scale of a file's integer output; None for a float output."""
    file = flatbuffer.read(data)
    (tensor,) = file.outputs
    for one in file.operators:
        if one.name == "DEQUANTIZE" and one.outputs[0].name == tensor.name:
            tensor = one.inputs[0]
    return None if tensor.scale is None else float(np.ravel(tensor.scale)[0])
