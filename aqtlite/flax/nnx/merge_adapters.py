"""Merges the adapters of NNX models into their kernels."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

from flax import nnx

from aqtlite.flax.nnx.calls import CALL, function_of
from aqtlite.flax.nnx.model import collection_of, state_of
from aqtlite.flax.nnx.pure import PureCall
from aqtlite.flax.nnx.quantize import M, check_quantized
from aqtlite.program.adapters.merge_adapters import merged_parameters
from aqtlite.program.adapters.merging import MergeReport
from aqtlite.program.convert import frozen_by_module
from aqtlite.program.serving import guards


def merge_adapters(
    model: M,
    *args: Any,
    method: str = CALL,
    report: Callable[[MergeReport], Any] | None = None,
    **kwargs: Any,
) -> M:
    """Adds the products of adapters to their kernels, in float.

    As `aqtlite.merge_adapters` does of functions.

    Args:
        model: a model with adapters, in training or converted: frozen kernels are
            dequantized.
        *args: arguments of a call that contracts all weights with adapters.
        method: name of the method to call.
        report: function to call with the `MergeReport`; `print` prints a table.
        **kwargs: as `args`.

    Returns:
        A copy with float kernels, quantized by the same rules without adapters, which
        `convert` takes.

    Raises:
        TypeError: if `model` is not quantized.
        ValueError: as for `aqtlite.merge_adapters`.
    """
    copy = nnx.clone(check_quantized(model, "merge_adapters"))
    call, aqt = PureCall(copy, method, args, kwargs), copy.aqt
    params, *others = call.arguments
    frozen = frozen_by_module(collection_of(copy))
    merged, found = merged_parameters(
        function_of(copy, call),
        params,
        tuple(others),
        {},
        state_of(copy),
        frozen,
        guards.NNX,
    )
    if report is not None:
        report(found)
    call.replace_params(merged)
    rules = (dataclasses.replace(rule, adapter=None) for rule in aqt.rules)
    aqt.rules = nnx.static(tuple(rules))
    aqt.remove_adapters()
    aqt.frozen, aqt.samples = nnx.data({}), nnx.data({})
    aqt.recipe, aqt.rngs = nnx.data(None), nnx.data(None)
    return cast(M, copy)
