"""Merges the adapters of Linen models into their kernels."""

from collections.abc import Callable, Mapping
from typing import Any

from aqtlite.flax.linen import given_variables
from aqtlite.flax.linen.quantize_model import QuantizedModel
from aqtlite.flax.linen.tools.adapters import with_values, without_adapters
from aqtlite.program.adapters.merging import MergeReport
from aqtlite.program.serving.frozen_record import COLLECTION
from aqtlite.quantization.states.state_collections import PARAMETERS


def merge_adapters(
    model: QuantizedModel,
    variables: Mapping[str, Any],
    *args: Any,
    report: Callable[[MergeReport], Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Adds the products of adapters to their kernels, in float.

    As `aqtlite.merge_adapters` does of functions.

    Args:
        model: result of `quantize_model`, by rules with adapters.
        variables: its variables with adapters, float or converted: frozen kernels are
            dequantized.
        *args: arguments of `apply`, or their shapes.
        report: function to call with the `MergeReport`; `print` prints a table.
        **kwargs: as `args`.

    Returns:
        Variables of the float model, which `convert` takes by rules without adapters.

    Raises:
        TypeError: if `model` is not a quantized model.
        ValueError: as for `aqtlite.merge_adapters`; and if a kernel that is frozen has
            no adapter to be merged, and is not dequantized.
    """
    if not isinstance(model, QuantizedModel):
        raise TypeError(
            "merge_adapters takes what aqtlite.flax.quantize_model returned, got "
            f"{type(model).__name__}"
        )
    changed, found = model.traced(variables, args, kwargs).merged()
    if report is not None:
        report(found)
    variables = given_variables.unfrozen(variables)
    params = with_values(variables[PARAMETERS], changed)
    others = {k: v for k, v in variables.items() if k not in (COLLECTION, PARAMETERS)}
    return {**others, PARAMETERS: without_adapters(params)}
