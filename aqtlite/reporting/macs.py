"""Multiply-accumulates of the contractions of jaxprs."""

import math
from typing import Any

import jax
from jax.extend import core

from aqtlite.jaxpr import equations, registry
from aqtlite.lowering import target
from aqtlite.lowering.forms.ragged import Ragged


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
    if name in registry.OF_PRIMITIVES or name in ("scaled_dot", "bcoo_dot_general"):
        return _of_contraction(eqn)
    ragged = ragged_of(eqn)
    if ragged is not None:
        return _of_groups(ragged, eqn)
    reference = target.reference_of(eqn)
    if reference is not None:
        return of_jaxpr(reference)
    inside = sum(map(of_jaxpr, equations.bodies(eqn)))
    if not inside:
        return 0
    if name == "pallas_call":
        return inside * kernel_runs(eqn)
    return inside * (equations.Scan.of(eqn).length if name == "scan" else 1)


def ragged_of(eqn: Any) -> Ragged | None:
    """Returns the contraction of an equation of this library, if it is in groups."""
    structure = getattr(target.function_of(eqn), "structure", None)
    if structure is None:
        return None
    found = jax.tree.unflatten(structure, [None] * structure.num_leaves)
    parts = found if isinstance(found, tuple) else (found,)
    return next((one for one in parts if isinstance(one, Ragged)), None)


def _of_groups(ragged: Ragged, eqn: Any) -> int:
    """Each group sums its own rows: its axis multiplies nothing."""
    sizes: dict[str, int] = {}
    for letters, atom in zip(ragged.axes_of[:2], eqn.invars, strict=False):
        # Digits, if any, are stacked before the axes.
        sizes.update(zip(reversed(letters), reversed(atom.aval.shape), strict=False))
    return math.prod(size for letter, size in sizes.items() if letter != "g")


def kernel_runs(eqn: Any) -> int:
    """Returns how often an equation runs its body, if that is a kernel of Pallas."""
    grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
    return math.prod(x for x in grid if isinstance(x, int))


def _of_contraction(eqn: Any) -> int:
    lhs, rhs = (atom.aval.shape for atom in eqn.invars[:2])
    out = _size(eqn.outvars[0].aval.shape)
    name = eqn.primitive.name
    if name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        zeros = math.prod(eqn.params["lhs_dilation"])
        return out * (_size(rhs) // max(rhs[numbers.rhs_spec[0]], 1)) // zeros
    if name == "bcoo_dot_general":
        (_, axes), (_, batch) = eqn.params["dimension_numbers"]
        shape = eqn.invars[2].aval.shape
        kept = [n for i, n in enumerate(shape) if i not in (*axes, *batch)]
        return _size(lhs) * _size(kept)
    if name in ("dot_general", "scaled_dot"):
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
