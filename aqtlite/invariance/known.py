"""Values that depend on no input, such as the frequencies of rotary embeddings.

They are computed in tracing, and become constants of the program, which XLA need not
compile forms for. NumPy gives the bits of the program: each step of a form is one
operation of IEEE 754. What differs is left to the program: results below the smallest
normal number, which it flushes to zero, NaN, and conversions out of range.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core

from aqtlite.invariance import rules
from aqtlite.invariance.arithmetic import Written
from aqtlite.jaxpr import equations
from aqtlite.lowering import target

LARGEST = 1 << 16
"""Elements of a constant: the bytes stay in the program."""


def results(
    eqn: Any, rule: rules.Rule | None, values: Sequence[np.ndarray]
) -> list[np.ndarray] | None:
    """Returns the results of an equation; None where the program has to compute them.

    Args:
        eqn: the equation.
        rule: its form; None for an operation that rounds nothing.
        values: its inputs.
    """
    try:
        if rule is None:
            return [_result(eqn, values)]
        _check_type(eqn.outvars[0].aval)
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values]
        form = jax.make_jaxpr(functools.partial(rules.apply, rule, eqn))(types)
        found = _evaluated(form, values)
        return None if any(np.isnan(x).any() for x in found) else found
    except _Unknown:
        return None


class _Unknown(Exception):
    """Raised for what NumPy does not compute as a program does."""


def _evaluated(
    closed: core.ClosedJaxpr, values: Sequence[np.ndarray]
) -> list[np.ndarray]:
    known = dict(zip(closed.jaxpr.invars, values, strict=True))
    known.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))

    def read(atom: Any) -> np.ndarray:
        return literal(atom) if isinstance(atom, core.Literal) else known[atom]

    for eqn in closed.jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        body = equations.called_body(eqn)
        if body is not None:
            outputs = _evaluated(body, inputs)
        elif (function := target.function_of(eqn)) is not None:
            types = [atom.aval for atom in eqn.invars]
            outputs = _evaluated(jax.make_jaxpr(_form(function))(*types), inputs)
        elif eqn.primitive.name == "optimization_barrier":
            outputs = inputs
        else:
            outputs = [_result(eqn, inputs)]
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars]


def _form(function: target.TargetDependent) -> Callable[..., jax.Array]:
    # The others that NumPy computes are barriers: sums and contractions are defined by
    # operations that are not in the table below.
    return function.form if isinstance(function, Written) else function.reference


def literal(atom: Any) -> np.ndarray:
    """Returns the value of a literal."""
    return np.asarray(equations.literal_value(atom), atom.aval.dtype)


def _result(eqn: Any, values: Sequence[np.ndarray]) -> np.ndarray:
    operation = _OPERATIONS.get(eqn.primitive.name)
    if operation is None or len(eqn.outvars) != 1:
        raise _Unknown
    (out,) = eqn.outvars
    for atom in (*eqn.invars, out):
        _check_type(atom.aval)
    with np.errstate(all="ignore"):
        found = np.asarray(operation(eqn.params, *values), out.aval.dtype)
    if found.dtype == np.float32:
        size = np.abs(found)
        if ((size > 0) & (size < np.finfo("f").tiny)).any():
            raise _Unknown
    return found


def _check_type(aval: Any) -> None:
    is_known = all(isinstance(size, int) for size in aval.shape)
    if not is_known or math.prod(aval.shape) > LARGEST or aval.dtype not in _DTYPES:
        raise _Unknown


_DTYPES = tuple(map(np.dtype, ("float32", "int32", "uint32", "bool")))


def _bitcast(params, x):
    if x.dtype.itemsize != np.dtype(params["new_dtype"]).itemsize:
        raise _Unknown
    return x.view(params["new_dtype"])


def _broadcast(params, x):
    shape = [1] * len(params["shape"])
    for axis, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
        shape[axis] = size
    return np.broadcast_to(x.reshape(shape), params["shape"])


def _converted(params, x):
    dtype = np.dtype(params["new_dtype"])
    is_to_integer = x.dtype == np.float32 and dtype.kind in "iu"
    if is_to_integer and not (np.abs(x) < 2.0**31).all():
        raise _Unknown
    if is_to_integer and dtype.kind == "u" and (x < 0).any():
        raise _Unknown
    return x.astype(dtype)


def _iota(params):
    shape = [1] * len(params["shape"])
    shape[params["dimension"]] = -1
    numbers = np.arange(params["shape"][params["dimension"]], dtype=params["dtype"])
    return np.broadcast_to(numbers.reshape(shape), params["shape"])


def _reduced(params, x):
    """Rounds mantissas, half to even."""
    if params["exponent_bits"] != 8:
        raise _Unknown
    dropped = np.uint32(max(23 - params["mantissa_bits"], 0))
    bits = x.view(np.uint32)
    if not dropped:
        return x
    last = bits >> dropped & np.uint32(1)
    bits = bits + last + np.uint32((1 << (int(dropped) - 1)) - 1)
    rounded = (bits >> dropped << dropped).view(np.float32)
    return np.where(np.isfinite(x), rounded, x)


def _round(params, x):
    if params["rounding_method"] != lax.RoundingMethod.TO_NEAREST_EVEN:
        raise _Unknown
    return np.rint(x)


def _shifted(function, dtype):
    """Shifts in a dtype; programs shift by 32 and more in another way."""

    def operation(params, x, count):
        del params
        if (count > 31).any():
            raise _Unknown
        return function(x.astype(dtype), count.astype(dtype)).astype(x.dtype)

    return operation


def _float_only(function):
    def operation(params, *values):
        del params
        if any(x.dtype != np.float32 for x in values):
            raise _Unknown
        return function(*values)

    return operation


def _of_values(function):
    def operation(params, *values):
        del params
        return function(*values)

    return operation


_FUNCTIONS = {
    **{"abs": np.abs, "add": np.add, "and": np.bitwise_and, "eq": np.equal},
    **{"ge": np.greater_equal, "gt": np.greater, "is_finite": np.isfinite},
    **{"le": np.less_equal, "lt": np.less, "max": np.maximum, "min": np.minimum},
    **{"mul": np.multiply, "ne": np.not_equal, "neg": np.negative},
    **{"not": np.invert, "or": np.bitwise_or, "sub": np.subtract},
    "xor": np.bitwise_xor,
}

_OPERATIONS: Mapping[str, Callable[..., np.ndarray]] = {
    **{name: _of_values(one) for name, one in _FUNCTIONS.items()},
    **{
        name: _float_only(one)
        for name, one in (("div", np.divide), ("floor", np.floor), ("sqrt", np.sqrt))
    },
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast,
    "clamp": _of_values(lambda low, x, high: np.minimum(np.maximum(x, low), high)),
    "convert_element_type": _converted,
    "copy": _of_values(lambda x: x),
    "iota": _iota,
    "reduce_precision": _reduced,
    "replica": _of_values(lambda: np.uint32(0)),
    "reshape": lambda params, x: x.reshape(params["new_sizes"]),
    "round": _round,
    "select_n": _of_values(lambda which, x, y: np.where(which, y, x)),
    "shift_left": _shifted(np.left_shift, np.uint32),
    "shift_right_arithmetic": _shifted(np.right_shift, np.int32),
    "shift_right_logical": _shifted(np.right_shift, np.uint32),
    "squeeze": lambda params, x: np.squeeze(x, params["dimensions"]),
}
"""What NumPy computes as a program does, by the name of the primitive."""
