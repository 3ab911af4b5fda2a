"""The parameters of a planned program, by what becomes of the weights made of them."""

from collections.abc import Mapping

from aqtlite.contraction import remat
from aqtlite.program import unsummed
from aqtlite.program.plan import Plan
from aqtlite.program.serving.model import Parameter

Inputs = Mapping[int, Parameter]
"""Inputs of the program that are parameters, by index."""


def quantized_weights(plan: Plan, parameters: Inputs) -> set[Parameter]:
    """Returns the parameters behind the weights and tables that are quantized."""
    return {
        parameters[i]
        for one in plan.operations()
        for origin in one.site.operands
        if origin.identity is not None
        for i in parameters.keys() & origin.needed
    }


def unsummed_weights(plan: Plan, parameters: Inputs) -> dict[Parameter, str]:
    """Returns parameters of weights left in float, since nothing is summed."""
    return {
        parameters[i]: one.why_float
        for one in plan.left_float()
        if one.why_float is not None and unsummed.is_reason(one.why_float)
        for operand, origin in zip((one.lhs, one.rhs), one.site.operands, strict=True)
        if operand.kind == "weight"
        for i in origin.inputs
    }


def quantized_elsewhere(plan: Plan, parameters: Inputs) -> set[Parameter]:
    """Returns parameters of weights that the traced function itself quantizes.

    Functions of this library name the operands that they quantize in the trace, and
    rules leave them unchanged.
    """
    return {
        parameters[i]
        for value in plan.named
        if value.name in (remat.LHS, remat.RHS)
        if (inputs := value.origin.inputs) <= parameters.keys()
        for i in inputs
    }
