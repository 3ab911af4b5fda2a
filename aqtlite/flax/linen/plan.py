"""Plans of the calls of Linen models."""

from collections.abc import Mapping
from typing import Any

from aqtlite.flax.linen import modes
from aqtlite.flax.linen.quantize_model import Model, QuantizedModel
from aqtlite.program import injected
from aqtlite.program.plan import Plan


def plan(
    model: Model,
    variables: Mapping[str, Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Plan:
    """Returns the decision about every contraction of a call, injected ones included.

    Nothing is run.

    Args:
        model: any Linen module, or the result of `quantize_model`.
        variables: variables of the model, or their shapes.
        args: positional arguments of the call, or their shapes.
        kwargs: keyword arguments of the call, or their shapes.
    """
    if not isinstance(model, QuantizedModel):
        model = QuantizedModel(model, ())
    with modes.in_float(), injected.marking():
        return model.plan(variables, *args, **kwargs)
