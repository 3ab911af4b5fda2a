"""Forms of the float operations of a program, by the name of their primitive."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from aqtlite.invariance import angles, arithmetic, devices, functions
from aqtlite.invariance.contractions import Dot
from aqtlite.invariance.convolutions import Conv
from aqtlite.invariance.pooling import ScatteredToChosen
from aqtlite.invariance.ragged import RaggedDot
from aqtlite.invariance.scatters import ScatterAdd
from aqtlite.jaxpr import equations
from aqtlite.lowering import exact, fusion
from aqtlite.lowering.sums import CumulativeSum, Sum, WindowedSum

Rule = Callable[..., jax.Array]
"""Function from the parameters of an equation and its inputs, of which floats are
float32, to its result in float32."""


class NoForm(ValueError):
    """Raised for an operation whose bits depend on more than values."""


def rule_of(eqn: Any) -> Rule | None:
    """Returns the form of an equation; None for one that rounds nothing.

    Raises:
        NoForm: if it has none.
    """
    name = eqn.primitive.name
    outputs = [var.aval for var in eqn.outvars]
    if not any(map(_is_float, outputs)) or name in _EXACT or _is_exact_sum(eqn):
        return None
    inputs = [atom.aval for atom in eqn.invars]
    if name not in _RULES:
        hint = _INSTEAD.get(name)
        raise NoForm(f"{name} has no such form" + (f": {hint}" if hint else ""))
    for aval in (*inputs, *outputs):
        if _is_float(aval) and aval.dtype not in _DTYPES:
            raise NoForm(f"{name} has no such form for {aval.dtype.name}")
    if name == "mul" and _is_scaled_by_a_power_of_two(eqn):
        return None
    if name in _OVER_AXES or name in OVER_DEVICES:
        for aval in inputs[:2]:
            if not _is_float(aval):
                raise NoForm(f"{name} has no such form for {aval.dtype.name}")
            if not all(isinstance(size, int) for size in aval.shape):
                raise NoForm(f"{name} has no such form for symbolic sizes")
    return _RULES[name]


def apply(rule: Rule, eqn: Any, values: Sequence[Any]) -> list[jax.Array]:
    """Evaluates an equation by its form, and rounds the result to its dtype."""
    wide = [exact.float32(x) if _is_float(x) else x for x in map(jnp.asarray, values)]
    out = rule(eqn.params, *wide)
    dtype = eqn.outvars[0].aval.dtype
    return [out if out.dtype == dtype else exact.rounded(out, dtype)]


_DTYPES = tuple(map(np.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))


def _is_float(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _is_exact_sum(eqn: Any) -> bool:
    """Whether an equation adds float32 values of which XLA knows none.

    It adds known ones first: ``(x + 1) - 1`` is `x`.
    """
    return eqn.primitive.name in _SUMS and all(
        atom.aval.dtype == np.float32 and not isinstance(atom, core.Literal)
        for atom in eqn.invars
    )


def _is_scaled_by_a_power_of_two(eqn: Any) -> bool:
    """Whether an equation multiplies float32 values by a known power of two."""
    if eqn.outvars[0].aval.dtype != np.float32:
        return False
    known = (atom for atom in eqn.invars if isinstance(atom, core.Literal))
    values = [np.asarray(equations.literal_value(atom)) for atom in known]
    return any(x.ndim == 0 and abs(np.frexp(x)[0]) == 0.5 for x in values)


def _converted(params, x):
    del params
    return x.astype(jnp.float32)


def _integer_pow(params, x):
    power, out = abs(params["y"]), None
    while power:
        if power & 1:
            out = x if out is None else arithmetic.MUL(out, x)
        power >>= 1
        x = arithmetic.MUL(x, x) if power else x
    if out is None:
        return jnp.ones_like(x)
    return out if params["y"] > 0 else arithmetic.DIV(np.float32(1), out)


def _as_kernel(function: Callable[..., jax.Array]) -> Rule:
    """Returns the rule of a function whose result is read from memory.

    To XLA, a function that is written out is a few cheap operations, which it computes
    again for every reader, and for each element of what the result is broadcast to.
    """

    def rule(params, *values):
        del params
        return fusion.barrier(function(*values))

    return rule


def _without_params(function: Callable[..., jax.Array]) -> Rule:
    def rule(params, *values):
        del params
        return function(*values)

    return rule


_SUMS = {
    "add": _without_params(arithmetic.ADD),
    "add_any": _without_params(arithmetic.ADD),
    "sub": _without_params(arithmetic.SUB),
}

_OVER_AXES: Mapping[str, Rule] = {
    "reduce_sum": lambda params, x: Sum(tuple(params["axes"]))(x),
    "cumsum": lambda params, x: CumulativeSum(params["axis"], params["reverse"])(x),
    "reduce_window_sum": lambda params, x: _of_params(WindowedSum, params)(x),
    "dot_general": lambda params, x, y: Dot(
        params["dimension_numbers"], params["out_sharding"]
    )(x, y),
    "conv_general_dilated": lambda params, x, y: _of_params(Conv, params)(x, y),
    "ragged_dot_general": lambda params, x, y, sizes: RaggedDot(
        params["ragged_dot_dimension_numbers"]
    )(x, y, sizes),
    "select_and_scatter_add": lambda params, source, x: _scattered(params, source, x),
}

OVER_DEVICES: Mapping[str, Rule] = {
    "psum": lambda params, x: devices.psum(
        x, params["axes"], params["axis_index_groups"]
    ),
    "psum_invariant": lambda params, x: devices.psum(x, params["axes"], to="invarying"),
    "reduce_scatter": lambda params, x: devices.reduce_scatter(
        x,
        params["axis_name"],
        params["axis_index_groups"],
        params["scatter_dimension"],
        params["tiled"],
    ),
}
"""Sums of the values that devices hold, which depend on how many hold them."""

_INSTEAD = dict.fromkeys(
    ("reduce_prod", "cumprod"),
    "multiply in a loop, or add logarithms of positive numbers",
)
"""What to do in place of operations without a form."""


def _of_params(form, params):
    """Makes a form of the parameters of an equation that have the names of its own."""
    names = (field.name for field in dataclasses.fields(form))
    values = {name: params[name] for name in names}
    return form(
        **{
            name: tuple(one) if isinstance(one, list) else one
            for name, one in values.items()
        }
    )


def _scattered(params, source, x):
    names = "window_dimensions", "window_strides", "padding"
    is_max = params["select_prim"].name == "ge"
    form = ScatteredToChosen(is_max, *(tuple(params[name]) for name in names))
    return form(source, x)


_RULES: Mapping[str, Rule] = {
    **{name: _as_kernel(one) for name, one in functions.UNARY.items()},
    "cos": lambda params, x: angles.sine_and_cosine(x)["cos"],
    "sin": lambda params, x: angles.sine_and_cosine(x)["sin"],
    **{name: _without_params(one) for name, one in arithmetic.ROOTS.items()},
    **_SUMS,
    **_OVER_AXES,
    **OVER_DEVICES,
    "convert_element_type": _converted,
    "div": _without_params(arithmetic.DIV),
    "integer_pow": _integer_pow,
    "mul": _without_params(arithmetic.MUL),
    "pow": _as_kernel(functions.POW),
    "scatter-add": lambda params, x, indices, updates: _of_params(ScatterAdd, params)(
        x, indices, updates
    ),
    "scatter-sub": lambda params, x, indices, updates: _of_params(ScatterAdd, params)(
        x, indices, -updates
    ),
    "square": lambda params, x: arithmetic.MUL(x, x),
}

_EXACT = frozenset(
    {
        *("abs", "all_gather", "all_gather_invariant", "all_to_all"),
        *("bitcast_convert_type", "broadcast_in_dim", "ceil", "clamp", "concatenate"),
        *("copy", "copy_p", "cummax", "cummin", "device_put", "dynamic_slice"),
        *("dynamic_update_slice", "empty", "expand_dims", "floor", "gather", "iota"),
        *("max", "mesh_cast", "min", "name", "neg", "nextafter"),
        *("optimization_barrier", "pad", "pbroadcast", "pmax", "pmin", "ppermute"),
        *("pvary", "reduce_max", "reduce_min", "reduce_precision", "reduce_window_max"),
        *("reduce_window_min", "rem", "reshape", "reshard", "rev", "round", "scatter"),
        *("scatter-max", "scatter-min", "select_and_gather_add", "select_n"),
        *("sharding_constraint", "sign", "slice", "sort", "split", "squeeze", "stack"),
        *("stop_gradient", "target_dependent", "tile", "top_k", "transpose", "unstack"),
    }
)
"""Primitives that move, choose or compare elements, or change them exactly."""
