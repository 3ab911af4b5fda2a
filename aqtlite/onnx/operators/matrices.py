"""Products of matrices."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.onnx.evaluation import Call, Value, is_static
from aqtlite.onnx.operators.convolutions import conv
from aqtlite.onnx.registry import operator


@operator("MatMul", weights=(0, 1))
def _matmul(call: Call, a: Value, b: Value) -> Value:
    return product(a, b)


def product(a: Value, b: Value) -> Value:
    """Matrix product, one contraction where batch axes agree."""
    a, b = jnp.asarray(a), jnp.asarray(b)
    if a.ndim != b.ndim or a.ndim < 3 or a.shape[:-2] != b.shape[:-2]:
        return jnp.matmul(a, b)
    batch = tuple(range(a.ndim - 2))  # jnp.matmul would squeeze axes of size 1.
    axes = (((a.ndim - 1,), (a.ndim - 2,)), (batch, batch))
    return lax.dot_general(a, b, axes)


@operator("Gemm", weights=(0, 1, 2))
def _gemm(call: Call, a: Value, b: Value, c: Value = None) -> Value:
    a = a.T if call.attribute("transA", 0) else a
    b = b.T if call.attribute("transB", 0) else b
    alpha, beta = call.attribute("alpha", 1.0), call.attribute("beta", 1.0)
    y = jnp.matmul(a, b)
    y = y if alpha == 1 else (alpha * y).astype(y.dtype)
    if c is None or beta == 0:
        return y
    return y + (c if beta == 1 else (beta * c).astype(c.dtype))


@operator("Einsum")
def _einsum(call: Call, *operands: Value) -> Value:
    return jnp.einsum(call.attribute("equation"), *map(jnp.asarray, operands))


@operator("MatMulInteger")
def _matmul_integer(
    call: Call, a: Value, b: Value, a_zero: Value = None, b_zero: Value = None
) -> Value:
    if a_zero is not None and a_zero.ndim == 1 and a_zero.size > 1:
        a_zero = a_zero[:, None]  # One for each row.
    left, right = _less_zero_point(a, a_zero), _less_zero_point(b, b_zero)
    return jnp.matmul(left, right)


def _less_zero_point(x: Value, zero: Value) -> Value:
    x = jnp.asarray(x, np.int32)
    if zero is None or (is_static(zero) and not zero.any()):
        return x
    return x - zero.astype(np.int32)


@operator("ConvInteger")
def _conv_integer(
    call: Call, x: Value, kernel: Value, x_zero: Value = None, kernel_zero: Value = None
) -> Value:
    if kernel_zero is not None and kernel_zero.size > 1:  # One for each output.
        kernel_zero = kernel_zero.reshape(-1, *[1] * (kernel.ndim - 1))
    left, right = _less_zero_point(x, x_zero), _less_zero_point(kernel, kernel_zero)
    return conv(call, left, right)


@operator("Det")
def _det(call: Call, x: Value) -> Value:
    return jnp.linalg.det(x)
