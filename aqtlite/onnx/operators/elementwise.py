"""Arithmetic, comparisons, logic, trigonometry."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.extras import package
from aqtlite.onnx.evaluation import Call, Value, is_static, numpy_of
from aqtlite.onnx.registry import operator

_SAME_NAMES = {
    "Abs": "abs",
    "Acos": "arccos",
    "Acosh": "arccosh",
    "Asin": "arcsin",
    "Asinh": "arcsinh",
    "Atan": "arctan",
    "Atanh": "arctanh",
    "BitwiseNot": "bitwise_not",
    "Ceil": "ceil",
    "Cos": "cos",
    "Cosh": "cosh",
    "Exp": "exp",
    "Floor": "floor",
    "IsNaN": "isnan",
    "Log": "log",
    "Neg": "negative",
    "Not": "logical_not",
    "Reciprocal": "reciprocal",
    "Round": "round",  # Halves to even.
    "Sign": "sign",
    "Sin": "sin",
    "Sinh": "sinh",
    "Sqrt": "sqrt",
    "Tan": "tan",
    "Tanh": "tanh",
    # Of two operands:
    "Add": "add",
    "And": "logical_and",
    "BitwiseAnd": "bitwise_and",
    "BitwiseOr": "bitwise_or",
    "BitwiseXor": "bitwise_xor",
    "Equal": "equal",
    "Greater": "greater",
    "GreaterOrEqual": "greater_equal",
    "Less": "less",
    "LessOrEqual": "less_equal",
    "Mul": "multiply",
    "Or": "logical_or",
    "Sub": "subtract",
    "Xor": "logical_xor",
}
"""Functions of NumPy and of `jax.numpy`."""


def same_name(name: str) -> Any:
    """Returns the operator that a function of NumPy and of `jax.numpy` computes."""

    def apply(call: Call, *operands: Value) -> Value:
        return getattr(numpy_of(*operands), name)(*scalars(operands))

    return apply


def scalars(operands: tuple[Value, ...]) -> tuple[Value, ...]:
    """Makes known single elements scalars, if that leaves the result unchanged.

    XLA then has constants in place of arrays that it would have to broadcast.
    """
    rank = max((x.ndim for x in operands if not is_static(x)), default=0)
    return tuple(
        x.reshape(()) if is_static(x) and x.size == 1 and x.ndim <= rank else x
        for x in operands
    )


for _operator, _function in _SAME_NAMES.items():
    operator(_operator)(same_name(_function))


@operator("Div")
def _div(call: Call, a: Value, b: Value) -> Value:
    if not np.issubdtype(a.dtype, np.integer):
        return numpy_of(a, b).divide(*scalars((a, b)))
    if is_static(a) and is_static(b):  # Towards zero, as in C.
        return (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(a.dtype)
    return lax.div(*jnp.broadcast_arrays(jnp.asarray(a), jnp.asarray(b)))


@operator("Mod")
def _mod(call: Call, a: Value, b: Value) -> Value:
    numpy = numpy_of(a, b)
    return (numpy.fmod if call.attribute("fmod", 0) else numpy.mod)(a, b)


@operator("Pow")
def _pow(call: Call, base: Value, exponent: Value) -> Value:
    if is_static(base) and is_static(exponent):
        return np.power(base, exponent).astype(base.dtype)
    if is_static(exponent) and exponent.size == 1 and exponent.ndim <= base.ndim:
        number = float(exponent.reshape(()))
        if number == 0.5 and jnp.issubdtype(base.dtype, jnp.floating):
            return jnp.sqrt(base)
        if number.is_integer() and abs(number) < 64 and _has_power(base, number):
            return lax.integer_pow(base, int(number))
    return jnp.power(base, exponent).astype(base.dtype)


def _has_power(base: Value, exponent: float) -> bool:
    return exponent >= 0 or jnp.issubdtype(base.dtype, jnp.floating)


@operator("Min", "Max")
def _extremum(call: Call, *operands: Value) -> Value:
    name = "minimum" if call.node.op_type == "Min" else "maximum"
    function = getattr(numpy_of(*operands), name)
    return functools.reduce(lambda a, b: function(*scalars((a, b))), operands)


@operator("Sum", "Mean")
def _sum(call: Call, *operands: Value) -> Value:
    total = functools.reduce(lambda a, b: a + b, operands)
    return total / len(operands) if call.node.op_type == "Mean" else total


@operator("Where")
def _where(call: Call, condition: Value, a: Value, b: Value) -> Value:
    return numpy_of(condition, a, b).where(condition, a, b)


@operator("Clip")
def _clip(call: Call, x: Value, low: Value = None, high: Value = None) -> Value:
    # Attributes before version 11.
    bounds = {
        "maximum": call.attribute("min", low),
        "minimum": call.attribute("max", high),
    }
    for name, bound in bounds.items():
        if bound is not None:
            bound = np.asarray(bound, x.dtype) if isinstance(bound, float) else bound
            x = getattr(numpy_of(x, bound), name)(x, bound.reshape(()))
    return x


@operator("BitShift")
def _shift(call: Call, x: Value, count: Value) -> Value:
    numpy = numpy_of(x, count)
    is_left = call.attribute("direction") == "LEFT"
    return (numpy.left_shift if is_left else numpy.right_shift)(x, count)


@operator("IsInf")
def _isinf(call: Call, x: Value) -> Value:
    numpy = numpy_of(x)
    positive = bool(call.attribute("detect_positive", 1)) & (x > 0)
    negative = bool(call.attribute("detect_negative", 1)) & (x < 0)
    return numpy.isinf(x) & (positive | negative)


@operator("Erf")
def _erf(call: Call, x: Value) -> Value:
    return lax.erf(jnp.asarray(x))


@operator("Cast", "CastLike")
def _cast(call: Call, x: Value, like: Value = None) -> Value:
    dtype = like.dtype if like is not None else dtype_of(call, call.attribute("to"))
    if is_static(x):
        return x.astype(dtype)
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    if dtype.name.startswith("float8") and call.attribute("saturate", 1):
        bound = jnp.asarray(jnp.finfo(dtype).max, x.dtype)
        x = jnp.clip(x, -bound, bound)
    return x.astype(dtype)


def dtype_of(call: Call, number: int) -> np.dtype[Any]:
    """Returns the dtype with a number of `onnx.TensorProto`."""
    onnx = package("onnx")
    if number == onnx.TensorProto.STRING:
        raise call.unsupported("JAX has no strings")
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(number))
