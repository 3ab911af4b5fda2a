"""Equations that look up rows of a matrix: `jnp.take` and indexing with integers."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

PRIMITIVES = frozenset({"gather", "dynamic_slice"})
"""Names of the primitives of lookups, whose first input is the table."""


def axis_of(eqn: Any) -> int | str:
    """Returns the axis of the rows that an equation looks up, or why it does not.

    >>> import jax.numpy as jnp
    >>> table, indices = jnp.ones((5, 4)), jnp.array([1, 2])
    >>> (eqn,) = jax.make_jaxpr(lambda x, i: x[i, 1:3])(table, indices).eqns[-1:]
    >>> axis_of(eqn)
    'it reads parts of rows, of shape (1, 2), of a table of shape (5, 4)'

    Args:
        eqn: equation of one of `PRIMITIVES`.
    """
    shape = eqn.invars[0].aval.shape
    sizes, params = eqn.params["slice_sizes"], eqn.params
    if len(shape) != 2:
        return f"it reads an array of shape {shape}, and tables have two axes"
    indexed: tuple[int, ...] = (0, 1)
    fills = False
    if eqn.primitive.name == "gather":
        numbers, mode = params["dimension_numbers"], params["mode"]
        if numbers.operand_batching_dims:
            return f"it looks up each row of shape {shape} in itself (batch axes)"
        indexed = tuple(map(int, numbers.start_index_map))
        fills = mode == lax.GatherScatterMode.FILL_OR_DROP
    cut = [axis for axis in (0, 1) if sizes[axis] != shape[axis]]
    # An index along an axis that is read as a whole is clipped to zero.
    axis = cut[0] if cut else indexed[0]
    if len(cut) > 1 or sizes[axis] != 1 or axis not in indexed:
        return f"it reads parts of rows, of shape {sizes}, of a table of shape {shape}"
    if fills and len(indexed) > 1:
        return f"it fills columns out of range of a table of shape {shape}"
    value = params.get("fill_value") if fills else None
    if value is not None and not math.isnan(value):
        return (
            f"it fills rows out of range of a table of shape {shape} with {value}, "
            "where a quantized table gives NaN"
        )
    return int(axis)


def take(eqn: Any, axis: int, table: Any, indices: Sequence[Any]) -> jax.Array:
    """Evaluates a lookup in an array with the table's rows, and any other sizes.

    Args:
        eqn: the equation.
        axis: axis of the rows.
        table: the array.
        indices: the other inputs of the equation.
    """
    sizes = tuple(1 if i == axis else n for i, n in enumerate(table.shape))
    params = {**eqn.params, "slice_sizes": sizes}
    if "fill_value" in params and not jnp.issubdtype(table.dtype, jnp.floating):
        params["fill_value"] = 0  # Integers have no NaN.
    out: jax.Array = eqn.primitive.bind(table, *indices, **params)
    return out
