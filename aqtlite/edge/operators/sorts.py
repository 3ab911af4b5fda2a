"""Sorts, which have no integer form; runtimes sort floats by one key."""

from aqtlite.edge.operators.base import Equation, Operator

SEVERAL_KEYS = "it sorts by several keys, and runtimes by one"
"""Why a sort that `has_several_keys` is in no file."""


def is_sort(operator: Operator) -> bool:
    """Whether an operator is a sort or the largest elements along an axis."""
    return isinstance(operator, Equation) and operator.primitive in ("sort", "top_k")


def has_several_keys(operator: Operator) -> bool:
    """Whether an operator is a sort by several keys."""
    return isinstance(operator, Equation) and operator.params.get("num_keys", 1) > 1
