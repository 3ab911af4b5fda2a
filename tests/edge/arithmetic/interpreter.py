"""Small models of single operators, run by LiteRT beside their simulation."""

import dataclasses
import io
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import litert_converter  # noqa: F401  Before the modules below, which it makes ready.
import numpy as np
from ai_edge_litert import interpreter
from jax import lax
from litert_converter import converter_api_ext
from litert_converter.mlir import ir, passmanager

from aqtlite.edge.arithmetic.kernels import Kernels
from aqtlite.edge.grid import Grid, Quantized

_SHORT = {"int8": "i8", "int4": "i4", "int2": "i2", "int16": "i16"}
_RESOLVERS = {
    "xnnpack": interpreter.OpResolverType.AUTO,
    "builtin": interpreter.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
    "reference": interpreter.OpResolverType.BUILTIN_REF,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """An operator with its inputs."""

    function: Callable[..., jax.Array]
    """Of floats."""

    inputs: tuple[tuple[np.ndarray, Grid], ...]
    """Integers and their grids."""

    grid: Grid
    simulate: Callable[..., jax.Array]
    """Of the inputs, `Quantized`."""


def grid(
    scale: Any, zero_point: int = 0, dtype: str = "int8", axis: Any = None
) -> Grid:
    """A grid with a scale of float32."""
    return Grid(np.float32(scale), zero_point, dtype, axis)


def integers(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str = "int8"
) -> np.ndarray:
    """Integers from all of a dtype."""
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return rng.integers(low, high + 1, shape).astype(dtype)


def constant(values: np.ndarray, of: Grid) -> jax.Array:
    """A constant that the model stores as integers."""
    return fake_quant(values.astype(np.float32) * of.scale, of)


def fake_quant(x: Any, of: Grid) -> jax.Array:
    """Marks a value as one of a grid."""
    attributes = _attributes(of)
    if of.axis is not None:
        attributes["quantization_dimension"] = of.axis
    mark = lax.composite(lambda x, **_: x, name="quant.fake_quant")
    return mark(jnp.asarray(x), **attributes)


def check(cases: Mapping[str, Case], kernels: Kernels = "xnnpack") -> None:
    """Asserts that the interpreter and the simulations give the same integers."""
    inputs = {name: [x for x, _ in case.inputs] for name, case in cases.items()}

    def model(inputs):
        return {name: _output(case, inputs[name]) for name, case in cases.items()}

    found = run(model, inputs, kernels)

    @jax.jit
    def simulate(inputs):
        found = {}
        for name, case in cases.items():
            grids = (of for _, of in case.inputs)
            found[name] = case.simulate(*map(Quantized, inputs[name], grids))
        return found

    simulated = simulate(inputs)
    for name in cases:
        np.testing.assert_array_equal(found[name], simulated[name], err_msg=name)


def run(
    function: Callable[[Any], dict[str, jax.Array]],
    inputs: Any,
    kernels: Kernels = "xnnpack",
) -> dict[str, np.ndarray]:
    """Converts a function of a pytree, and runs the model."""
    lowered = jax.jit(function).lower(inputs)
    names = [f"input_{i}" for i in range(len(jax.tree.leaves(inputs)))]
    model = interpreter.Interpreter(
        model_content=_convert(lowered, names, sorted(lowered.out_info)),
        experimental_op_resolver_type=_RESOLVERS[kernels],
    )
    arguments = dict(zip(names, jax.tree.leaves(inputs), strict=True))
    return model.get_signature_runner("serving_default")(**arguments)


def _convert(lowered: Any, inputs: list[str], outputs: list[str]) -> bytes:
    buffer = io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(buffer)
    context = ir.Context()
    converter_api_ext.prepare_mlir_context(context)
    with context:
        module = ir.Module.parse(buffer.getvalue())
        config = converter_api_ext.ConvertToTFLConfig()
        config.model_origin_framework = "JAX"
        config.strict_qdq_mode = True
        converter_api_ext.set_signature(
            module.operation, "serving_default", inputs, outputs
        )
        converter_api_ext.run_convert_to_tfl_passes(
            module, passmanager.PassManager(), config
        )
        return converter_api_ext.export_flatbuffer_to_bytes(module.operation)


def _output(case: Case, inputs: list[jax.Array]) -> jax.Array:
    floats = [
        _dequantize(x, of) for x, (_, of) in zip(inputs, case.inputs, strict=True)
    ]
    return _quantize(fake_quant(case.function(*floats), case.grid), case.grid)


def _dequantize(x: jax.Array, of: Grid) -> jax.Array:
    composite = lax.composite(
        lambda x, **_: x.astype(jnp.float32), name="quant.dequantize"
    )
    return composite(x, **_attributes(of))


def _quantize(x: jax.Array, of: Grid) -> jax.Array:
    composite = lax.composite(lambda x, **_: x.astype(of.dtype), name="quant.quantize")
    return composite(x, **_attributes(of))


def _attributes(of: Grid) -> dict[str, Any]:
    scale = np.atleast_1d(np.asarray(of.scale, np.float32))
    return {
        "scale": scale,
        "zero_point": np.full(scale.shape, of.zero_point, np.int64),
        "dtype": _SHORT[of.dtype],
        "narrow_range": of.axis is not None,
    }
