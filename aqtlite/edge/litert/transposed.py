"""Transposed convolutions in float, in the one form that the converter gets right.

LiteRT's TRANSPOSE_CONV computes all sums that the input reaches. With other paddings
or a dilated kernel, litert-converter 0.5 makes one of another shape or with other sums.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.edge.operators.base import (
    Equation,
    Operator,
    is_transposed_convolution,
)

_LARGEST_RANK = 4


def refusal(operator: Operator, shape: Sequence[int]) -> str | None:
    """Why LiteRT has no transposed convolution of a shape; None if it has."""
    if not is_transposed_convolution(operator) or len(shape) <= _LARGEST_RANK:
        return None
    return (
        "it is a transposed convolution over more than two axes; a path that ends in "
        ".onnx may have it"
    )


def takes_frozen(operator: Operator) -> bool:
    """Whether a file has the integers of an operator's weight, if there are any.

    The converter slices the kernel of a transposed convolution of groups in the file.
    """
    if not is_transposed_convolution(operator):
        return True
    return bool(operator.params["feature_group_count"] == 1)


def dilated(operator: Operator, position: int, x: Any) -> Any:
    """An operand of any operator, as `compute` takes it: a kernel with its zeros."""
    if position != 1 or not is_transposed_convolution(operator):
        return x
    steps, widths = operator.params["rhs_dilation"], [(0, 0, 0)] * x.ndim
    axes = operator.params["dimension_numbers"].rhs_spec[2:]
    for axis, step in zip(axes, steps, strict=True):
        widths[axis] = 0, 0, step - 1
    return lax.pad(x, np.zeros((), x.dtype), widths) if max(steps) > 1 else x


def compute(operator: Equation, inputs: Sequence[Any]) -> list[jax.Array]:
    """Computes a transposed convolution from all its sums, of which it takes some.

    Args:
        operator: a transposed convolution.
        inputs: its inputs, as `dilated` returns them.
    """
    params, (x, kernel) = operator.params, inputs
    dims = params["dimension_numbers"]
    of_window, of_sums = dims.rhs_spec[2:], dims.out_spec[2:]
    reach = [kernel.shape[axis] - 1 for axis in of_window]
    given = {
        name: params[name]
        for name in (
            "lhs_dilation",
            "dimension_numbers",
            "feature_group_count",
            "batch_group_count",
            "precision",
            "preferred_element_type",
        )
    }
    y = lax.conv_general_dilated(
        x, kernel, (1,) * len(reach), [(n, n) for n in reach], **given
    )
    return [_taken(y, of_sums, reach, params["padding"], params["window_strides"])]


def _taken(
    y: jax.Array,
    axes: Sequence[int],
    reach: Sequence[int],
    padding: Sequence[tuple[int, int]],
    strides: Sequence[int],
) -> jax.Array:
    """The sums that a padding and strides ask for, of all sums along some axes."""
    start, step = [0] * y.ndim, [1] * y.ndim
    limit, zeros = list(y.shape), [(0, 0)] * y.ndim
    for axis, n, (low, high), stride in zip(axes, reach, padding, strides, strict=True):
        start[axis], step[axis] = max(n - low, 0), stride
        zeros[axis] = max(low - n, 0), max(high - n, 0)
        limit[axis] += sum(zeros[axis]) - max(n - high, 0)
    if any(map(any, zeros)):
        y = jnp.pad(y, zeros)
    return lax.slice(y, start, limit, step)
