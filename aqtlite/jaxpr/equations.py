"""The equations of a jaxpr: their bodies, and the literals that they read."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.extend import core
from jax.extend.core import primitives

_CALLS = (
    primitives.jit_p,
    primitives.call_p,
    primitives.closed_call_p,
    primitives.remat_p,
    primitives.custom_jvp_call_p,
    primitives.custom_vjp_call_p,
)


def called_body(eqn: Any) -> core.ClosedJaxpr | None:
    """Returns the body of an equation that just calls it (jit, remat, custom_vjp, ...).

    The inputs and outputs of such a body are the equation's, one to one. None for every
    other equation. The primitive decides: the computation of a `lax.reduce` may have
    as many inputs and outputs as the equation, too.
    """
    if eqn.primitive not in _CALLS:
        return None
    found = list(bodies(eqn))
    return found[0] if len(found) == 1 else None


def bodies(eqn: Any) -> Iterator[core.ClosedJaxpr]:
    """Yields all jaxprs among the parameters of an equation."""
    for value in eqn.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, core.ClosedJaxpr):
                yield one
            elif isinstance(one, core.Jaxpr) and not one.constvars:
                yield core.ClosedJaxpr(one, ())


def literal_value(literal: Any) -> Any:
    """Returns the value of a literal, which has a dtype.

    JAX gives Python's numbers types of its own, which keep dtype and weak type, but
    leaves a bool as it is.
    """
    value = literal.val
    is_typed = hasattr(value, "dtype")
    return value if is_typed else np.asarray(value, literal.aval.dtype)
