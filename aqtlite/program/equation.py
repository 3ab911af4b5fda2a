"""What a contraction's equation says of itself, before any rule."""

import string
from typing import Any

import jax.numpy as jnp

EMPTY = "an operand is empty"


def why_not_quantized(eqn: Any) -> str | None:
    """Returns why an equation cannot be quantized, or None if it can.

    Args:
        eqn: equation of one of the primitives in `registry.OF_PRIMITIVES`.
    """
    lhs, rhs = (atom.aval for atom in eqn.invars[:2])
    for aval in (lhs, rhs):
        if not jnp.issubdtype(aval.dtype, jnp.floating):
            return f"it contracts {aval.dtype.name}, and only floats are quantized"
    if 0 in lhs.shape and 0 in rhs.shape:
        return EMPTY
    if eqn.primitive.name == "ragged_dot_general":
        dims = eqn.params["ragged_dot_dimension_numbers"]
        found = (
            dims.dot_dimension_numbers,
            tuple(dims.lhs_ragged_dimensions),
            tuple(dims.rhs_group_dimensions),
        )
        if found != ((((1,), (1,)), ((), ())), (0,), (0,)) or (
            eqn.params["group_offset"] is not None
        ):
            return "it is a ragged_dot_general of other axes than lax.ragged_dot's"
    return None


def equation_of(eqn: Any) -> str | None:
    """Returns the axes of a `dot_general` as an einsum equation, None for other ones.

    >>> import jax
    >>> closed = jax.make_jaxpr(jnp.matmul)(jnp.ones((2, 3, 4)), jnp.ones((4, 5)))
    >>> equation_of(closed.eqns[0])
    'abc,cd->abd'
    """
    if eqn.primitive.name != "dot_general":
        return None
    (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = eqn.params["dimension_numbers"]
    letters = iter(string.ascii_lowercase + string.ascii_uppercase)
    lhs = [next(letters) for _ in eqn.invars[0].aval.shape]
    shared = dict(zip((*rhs_ca, *rhs_ba), (*lhs_ca, *lhs_ba), strict=True))
    rhs = [
        lhs[shared[axis]] if axis in shared else next(letters)
        for axis in range(len(eqn.invars[1].aval.shape))
    ]
    batch = [lhs[axis] for axis in lhs_ba]
    kept = [x for axis, x in enumerate(lhs) if axis not in (*lhs_ca, *lhs_ba)]
    kept += [x for axis, x in enumerate(rhs) if axis not in (*rhs_ca, *rhs_ba)]
    return f"{''.join(lhs)},{''.join(rhs)}->{''.join(batch + kept)}"
