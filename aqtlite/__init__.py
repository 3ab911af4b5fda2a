"""Quantized contractions for JAX: int8 and int4 training and serving.

A *config* (`aqtlite.config`) says what to quantize and how. `make_dot_general`,
`make_conv_general_dilated` and `make_ragged_dot` turn a config into a replacement for
`jax.lax.dot_general`, `jax.lax.conv_general_dilated` or `jax.lax.ragged_dot`, with
quantized gradients; `aqtlite.flax` puts them into Flax layers and freezes trained
weights for serving. `quantize_function` quantizes the contractions of any function by
rules, and `convert_function` freezes its weights.
"""

import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aqtlite import kv_cache
    from aqtlite.allocation.choose import choose_bits
    from aqtlite.allocation.sensitivity import sensitivity
    from aqtlite.contraction import einsum_states, remat
    from aqtlite.contraction.conv_general_dilated import (
        make_conv_general_dilated,
    )
    from aqtlite.contraction.dot_general import make_dot_general
    from aqtlite.contraction.einsum import einsum
    from aqtlite.contraction.ragged_dot import make_ragged_dot
    from aqtlite.invariance.transform import invariant
    from aqtlite.jaxpr.registry import register_operation
    from aqtlite.program.adapters.initial_adapters import with_initial_adapters
    from aqtlite.program.adapters.merge_adapters import merge_adapters
    from aqtlite.program.adapters.merging import MergeReport
    from aqtlite.program.biases import correct_biases
    from aqtlite.program.calibration_state import with_gradient_statistics
    from aqtlite.program.compiled.compile_serving import ServingProgram, compile_serving
    from aqtlite.program.convert import convert_function
    from aqtlite.program.measuring.measure import measure_serving, measure_training
    from aqtlite.program.plan_of_call import plan
    from aqtlite.program.quantize import quantize_function
    from aqtlite.program.rules import rules
    from aqtlite.program.rules.rules import Rule
    from aqtlite.program.serving.placeholder import is_frozen
    from aqtlite.program.tabulate import tabulate
    from aqtlite.qtensor import shape_operations
    from aqtlite.qtensor.qtensor import QTensor
    from aqtlite.quantization.optimizer_states import quantize_optimizer
    from aqtlite.quantization.quantize import quantize
    from aqtlite.quantization.states import fixed_scale, statistics
    from aqtlite.quantization.states.stored_statistics import restored_statistics
    from aqtlite.reporting.report import report
    from aqtlite.taps.diagnose import Finding, diagnose
    from aqtlite.taps.history import plot_taps
    from aqtlite.taps.records import Taps
    from aqtlite.taps.tap import tap, tap_against_float

__all__ = [
    "Finding",
    "MergeReport",
    "QTensor",
    "Rule",
    "ServingProgram",
    "Taps",
    "__version__",
    "choose_bits",
    "compile_serving",
    "convert_function",
    "correct_biases",
    "diagnose",
    "einsum",
    "einsum_states",
    "fixed_scale",
    "invariant",
    "is_frozen",
    "kv_cache",
    "make_conv_general_dilated",
    "make_dot_general",
    "make_ragged_dot",
    "measure_serving",
    "measure_training",
    "merge_adapters",
    "plan",
    "plot_taps",
    "quantize",
    "quantize_function",
    "quantize_optimizer",
    "register_operation",
    "remat",
    "report",
    "restored_statistics",
    "rules",
    "sensitivity",
    "shape_operations",
    "statistics",
    "tabulate",
    "tap",
    "tap_against_float",
    "with_gradient_statistics",
    "with_initial_adapters",
]

__version__ = "0.1.0"

_MODULES = [
    *("calibration", "checkpoint", "config", "edge", "errors", "flax", "kv_cache"),
    *("llm", "noise", "numerics", "onnx", "testing"),
]

_PLACES = {
    "MergeReport": "program.adapters.merging:MergeReport",
    "Finding": "taps.diagnose:Finding",
    "QTensor": "qtensor.qtensor:QTensor",
    "Rule": "program.rules.rules:Rule",
    "ServingProgram": "program.compiled.compile_serving:ServingProgram",
    "Taps": "taps.records:Taps",
    "choose_bits": "allocation.choose:choose_bits",
    "compile_serving": "program.compiled.compile_serving:compile_serving",
    "convert_function": "program.convert:convert_function",
    "correct_biases": "program.biases:correct_biases",
    "diagnose": "taps.diagnose:diagnose",
    "einsum": "contraction.einsum:einsum",
    "einsum_states": "contraction.einsum_states",
    "fixed_scale": "quantization.states.fixed_scale",
    "invariant": "invariance.transform:invariant",
    "is_frozen": "program.serving.placeholder:is_frozen",
    "make_conv_general_dilated": (
        "contraction.conv_general_dilated:make_conv_general_dilated"
    ),
    "make_dot_general": "contraction.dot_general:make_dot_general",
    "make_ragged_dot": "contraction.ragged_dot:make_ragged_dot",
    "measure_serving": "program.measuring.measure:measure_serving",
    "measure_training": "program.measuring.measure:measure_training",
    "merge_adapters": "program.adapters.merge_adapters:merge_adapters",
    "plan": "program.plan_of_call:plan",
    "plot_taps": "taps.history:plot_taps",
    "quantize": "quantization.quantize:quantize",
    "quantize_function": "program.quantize:quantize_function",
    "quantize_optimizer": "quantization.optimizer_states:quantize_optimizer",
    "register_operation": "jaxpr.registry:register_operation",
    "remat": "contraction.remat",
    "report": "reporting.report:report",
    "restored_statistics": "quantization.states.stored_statistics:restored_statistics",
    "rules": "program.rules.rules",
    "sensitivity": "allocation.sensitivity:sensitivity",
    "shape_operations": "qtensor.shape_operations",
    "statistics": "quantization.states.statistics",
    "tabulate": "program.tabulate:tabulate",
    "tap": "taps.tap:tap",
    "tap_against_float": "taps.tap:tap_against_float",
    "with_gradient_statistics": "program.calibration_state:with_gradient_statistics",
    "with_initial_adapters": "program.adapters.initial_adapters:with_initial_adapters",
    **{name: name for name in _MODULES},
}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use.

    The command line can then print its help without importing JAX, which is slow.
    """
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Without a colon, a module that lacks a package would be looked up here again.
    place = f"{__name__}.{_PLACES[name]}"
    place = place if ":" in place else f"{place}:"
    globals()[name] = value = pkgutil.resolve_name(place)
    return value


def __dir__() -> list[str]:
    """Public names and modules; all else in the package is private."""
    return [*__all__, *(name for name in _MODULES if name not in __all__)]
