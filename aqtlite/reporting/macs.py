"""Multiply-accumulates of the contractions of jaxprs."""

import math
from typing import Any

from jax.extend import core

from aqtlite.jaxpr import equations, registry
from aqtlite.lowering import target


def of_jaxpr(closed: core.ClosedJaxpr) -> int:
    """Returns the multiply-accumulates of a jaxpr, those of scans in all their steps.

    >>> import jax, jax.numpy as jnp
    >>> of_jaxpr(jax.make_jaxpr(jnp.matmul)(jnp.ones((2, 3)), jnp.ones((3, 4))))
    24

    Args:
        closed: the jaxpr. Branches all count, and while loops once.
    """
    return sum(map(of_equation, closed.jaxpr.eqns))


def of_equation(eqn: Any) -> int:
    """Returns the multiply-accumulates of an equation and of its bodies."""
    name = eqn.primitive.name
    if name in registry.OF_PRIMITIVES:
        return _of_contraction(eqn)
    reference = target.reference_of(eqn)
    if reference is not None:
        return of_jaxpr(reference)
    inside = sum(map(of_jaxpr, equations.bodies(eqn)))
    if not inside:
        return 0
    if name == "pallas_call":
        return inside * math.prod(x for x in _grid(eqn) if isinstance(x, int))
    return inside * (equations.Scan.of(eqn).length if name == "scan" else 1)


def _grid(eqn: Any) -> tuple[Any, ...]:
    return tuple(getattr(eqn.params.get("grid_mapping"), "grid", ()))


def _of_contraction(eqn: Any) -> int:
    lhs, rhs = (atom.aval.shape for atom in eqn.invars[:2])
    out = _size(eqn.outvars[0].aval.shape)
    name = eqn.primitive.name
    if name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        zeros = math.prod(eqn.params["lhs_dilation"])
        return out * (_size(rhs) // max(rhs[numbers.rhs_spec[0]], 1)) // zeros
    if name == "dot_general":
        (axes, _), _ = eqn.params["dimension_numbers"]
        return out * _size(lhs[axis] for axis in axes)
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (axes, _), _ = numbers.dot_dimension_numbers
    groups = _size(eqn.invars[2].aval.shape)
    is_ragged = bool(set(numbers.lhs_ragged_dimensions) & set(axes))
    # Each group sums its own rows, and together they sum all.
    out = out // max(groups, 1) if is_ragged else out
    return out * _size(lhs[axis] for axis in axes)


def _size(shape: Any) -> int:
    """The number of elements; symbolic sizes (`jax.export`) count as one."""
    return math.prod(n for n in shape if isinstance(n, int))
