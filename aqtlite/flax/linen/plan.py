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
    """Decides about every contraction of a call, injected or not, and runs nothing.

    Args:
        model: any Linen module, or what `quantize_model` made of one.
        variables: variables of the model, or their shapes.
        args: those of the call, or their shapes.
        kwargs: the same.
    """
    if not isinstance(model, QuantizedModel):
        model = QuantizedModel(model, ())
    with modes.in_float(), injected.marking():
        return model.plan(variables, *args, **kwargs)
