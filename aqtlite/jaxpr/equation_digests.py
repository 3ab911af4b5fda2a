"""Digests of equations, by which stored weights know how they were computed.

Parameters of primitives come and go between versions of JAX, and most say nothing of
the values. Of the primitives that make weights of parameters, those that do are listed:
the digest of such an equation is the same with every JAX.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from aqtlite.jaxpr.origins import Origin, digest

_ELEMENTWISE = """abs add add_any and clamp copy copy_p div eq ge gt le lt max min mul
ne neg not optimization_barrier or pow rem select_n sign square sub xor"""

_APPROXIMATED = "cos erf exp exp2 expm1 log log1p logistic rsqrt sin sqrt tanh"

_REDUCTIONS = "reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum"

# By name of the primitive; a parameter that is absent or None is left out.
_LISTED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_ELEMENTWISE.split(), ()),
    **dict.fromkeys(_APPROXIMATED.split(), ("accuracy",)),
    **dict.fromkeys(_REDUCTIONS.split(), ("axes",)),
    "bitcast_convert_type": ("new_dtype",),
    "broadcast_in_dim": ("shape", "broadcast_dimensions"),
    "concatenate": ("dimension",),
    "convert_element_type": ("new_dtype",),
    "dot_general": ("dimension_numbers", "precision", "preferred_element_type"),
    "dynamic_slice": ("slice_sizes",),
    "dynamic_update_slice": (),
    "integer_pow": ("y",),
    "iota": ("dtype", "shape", "dimension"),
    "pad": ("padding_config",),
    "reduce_precision": ("exponent_bits", "mantissa_bits"),
    "reshape": ("new_sizes", "dimensions"),
    "rev": ("dimensions",),
    "slice": ("start_indices", "limit_indices", "strides"),
    "split": ("sizes", "axis"),
    "squeeze": ("dimensions",),
    "transpose": ("permutation",),
}


def identities(eqn: Any, inputs: Sequence[Origin]) -> tuple[str | None, str | None]:
    """Returns the digest of an equation and its former digest, by those of its inputs.

    Returns:
        None if an input has none, or the equation has an effect.
    """
    known = [one.identity for one in inputs if one.identity is not None]
    if len(known) != len(inputs) or eqn.effects:
        return None, None
    before = [one.former or known[i] for i, one in enumerate(inputs)]
    return of_equation(eqn, known), former(eqn, before)


def of_equation(eqn: Any, identities: Sequence[str]) -> str:
    """Returns the digest of an equation of inputs with the given identities.

    An equation of a primitive that is not listed counts with all of its parameters.
    """
    name = eqn.primitive.name
    if name not in _LISTED:
        return former(eqn, identities)
    params = [
        f"{param}={_text(eqn.params[param])}"
        for param in _LISTED[name]
        if eqn.params.get(param) is not None
    ]
    return digest("equation", name, *params, *identities)


def former(eqn: Any, identities: Sequence[str]) -> str:
    """Returns the digest with all parameters, as weights were stored with before."""
    params = {name: str(eqn.params[name]) for name in sorted(eqn.params)}
    return digest(eqn.primitive.name, str(params), *identities)


def _text(value: Any) -> str:
    """A parameter as text, the same for lists and tuples, and for NumPy's numbers."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, np.integer):
        return str(int(value))
    return value.name if isinstance(value, np.dtype) else str(value)
