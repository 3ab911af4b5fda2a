"""Forms of the float operations of a program, by the name of their primitive."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.invariance import functions
from aqtlite.invariance.contractions import Dot
from aqtlite.invariance.sums import CumulativeSum, Sum
from aqtlite.lowering import exact

Rule = Callable[..., jax.Array]
"""Function from the parameters of an equation and its inputs, of which floats are
float32, to its result."""


def rule_of(eqn: Any) -> Rule | None:
    """Returns the form of an equation that rounds; None for one that does not.

    Raises:
        NotImplementedError: if it has no form.
    """
    name = eqn.primitive.name
    types = [var.aval for var in eqn.outvars]
    if not any(map(_is_float, types)) or name in _EXACT:
        return None
    if name in _SUMS and _is_plain_sum(eqn):
        return None
    if name not in RULES:
        raise NotImplementedError(name)
    wide = [t for t in (*types, *(x.aval for x in eqn.invars)) if _is_wide(t)]
    if wide:
        raise NotImplementedError(f"{name} of {wide[0].dtype}")
    return RULES[name]


def apply(rule: Rule, eqn: Any, values: Sequence[Any]) -> list[jax.Array]:
    """Evaluates an equation by its form, in float32, and rounds to its dtype."""
    wide = [exact.float32(x) if _is_float(x) else x for x in map(jnp.asarray, values)]
    out = rule(eqn.params, *wide)
    dtype = eqn.outvars[0].aval.dtype
    return [out if out.dtype == dtype else exact.rounded(out, dtype)]


def _is_plain_sum(eqn: Any) -> bool:
    """Whether an equation adds float32 values, none of which XLA may know."""
    return all(
        x.aval.dtype == np.float32 and not isinstance(x, core.Literal)
        for x in eqn.invars
    )


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _is_wide(x: Any) -> bool:
    return x.dtype == np.float64 or jnp.issubdtype(x.dtype, jnp.complexfloating)


def _converted(params, x):
    del params
    return x.astype(jnp.float32)


def _integer_pow(params, x):
    power = abs(params["y"])
    out = None
    while power:
        if power & 1:
            out = x if out is None else functions.MUL(out, x)
        power >>= 1
        x = functions.MUL(x, x) if power else x
    if out is None:
        return jnp.ones_like(x)
    return out if params["y"] > 0 else functions.DIV(np.float32(1), out)


def _without_params(function: Callable[..., jax.Array]) -> Rule:
    def rule(params, *values):
        del params
        return function(*values)

    return rule


RULES: Mapping[str, Rule] = {
    **{name: _without_params(one) for name, one in functions.UNARY.items()},
    "mul": _without_params(functions.MUL),
    "div": _without_params(functions.DIV),
    "pow": _without_params(functions.POW),
    "add": _without_params(functions.ADD),
    "sub": _without_params(functions.SUB),
    "add_any": _without_params(functions.ADD),
    "square": lambda params, x: functions.MUL(x, x),
    "integer_pow": _integer_pow,
    "convert_element_type": _converted,
    "reduce_sum": lambda params, x: Sum(tuple(params["axes"]))(x),
    "cumsum": lambda params, x: CumulativeSum(params["axis"], params["reverse"])(x),
    "dot_general": lambda params, x, y: Dot(params["dimension_numbers"])(x, y),
}

_SUMS = frozenset({"add", "sub", "add_any"})

_EXACT = frozenset(
    {
        *("abs", "argmax", "argmin", "bitcast_convert_type", "broadcast_in_dim"),
        *("ceil", "clamp", "concatenate", "copy", "copy_p", "cummax", "cummin"),
        *("device_put", "dynamic_slice", "dynamic_update_slice", "empty"),
        *("expand_dims", "floor", "gather", "imag", "iota", "is_finite", "max", "min"),
        *("mesh_cast", "name", "neg", "nextafter", "optimization_barrier", "pad"),
        *(
            "pvary",
            "random_bits",
            "real",
            "reduce_max",
            "reduce_min",
            "reduce_precision",
        ),
        *(
            "rem",
            "reshape",
            "reshard",
            "rev",
            "round",
            "scatter",
            "select_and_gather_add",
        ),
        *("select_n", "sharding_constraint", "sign", "slice", "sort", "split"),
        *("squeeze", "stop_gradient", "top_k", "transpose", "unstack"),
        *("scatter-add", "scatter-max", "scatter-min", "scatter-sub", "scatter_add"),
        "target_dependent",
    }
)
"""Primitives that move, choose or compare elements, or add them in a given order."""
