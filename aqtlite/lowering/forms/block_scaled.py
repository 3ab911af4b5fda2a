"""Products of matrices that take a scale per block, beside the values.

XLA:GPU has cuDNN run them on the matrix units of Blackwell GPUs. This is the product of
`jax.nn.scaled_matmul`, which cannot be called while a program is lowered: it asks for
the devices of the program, of which JAX knows only if it sees the call in the jaxpr.
"""

import json
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite.shapes import dimension_numbers as dn

TARGET = "__op$block_scaled_dot"
"""Name of the custom call, which XLA:GPU replaces."""

# What `jax.nn.scaled_matmul` gives XLA; a test compares the two.
_CONFIG = json.dumps(
    {
        "scaled_dot_backend_config": {
            "lhs_batch_dimensions": [0],
            "rhs_batch_dimensions": [0],
            "dequantize_type": "F32",
        }
    }
)


def dot(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_scale: jax.Array,
    rhs_scale: jax.Array,
    dims: dn.DimensionNumbers,
) -> jax.Array:
    """Contracts by `lax.dot_general` with these dimension numbers, to float32.

    Args:
        lhs: values, float8_e4m3fn, float8_e5m2 or float4_e2m1fn.
        rhs: like `lhs`.
        lhs_scale: scales of lhs, float8_e8m0fnu or float8_e4m3fn, with an element for
            each element or block of lhs along each axis, or a single one.
        rhs_scale: like `lhs_scale`.
        dims: dimension numbers. Blocks are along the last contracting axis.
    """
    shape = dn.output_shape(dims, lhs.shape, rhs.shape)
    contracting, batch = dims
    sides = []
    for x, scale, ca, ba in zip(
        (lhs, rhs), (lhs_scale, rhs_scale), contracting, batch, strict=True
    ):
        remaining = dn.remaining_axes(x.ndim, ca, ba)
        counts = [x.shape[axis] for axis in range(x.ndim)]
        counts[ca[-1]] = scale.shape[ca[-1]]
        scale = jnp.broadcast_to(scale, counts)
        sides.append([_as_matrices(one, ba, remaining, ca) for one in (x, scale)])
    (left, left_scale), (right, right_scale) = sides
    return _product(left, right, left_scale, right_scale).reshape(shape)


def _as_matrices(x: jax.Array, *groups: dn.Axes) -> jax.Array:
    """Transposes to batch, remaining and contracting axes, merged to one each."""
    sizes = [math.prod(x.shape[axis] for axis in group) for group in groups]
    return lax.transpose(x, sum(groups, ())).reshape(sizes)


@jax.custom_batching.custom_vmap
def _product(
    lhs: jax.Array, rhs: jax.Array, lhs_scale: jax.Array, rhs_scale: jax.Array
) -> jax.Array:
    """Contracts the last axes of stacks of matrices, with scales of theirs."""
    shape = (*lhs.shape[:2], rhs.shape[1])
    call = jax.ffi.ffi_call(
        TARGET,
        jax.ShapeDtypeStruct(shape, jnp.float32),
        custom_call_api_version=2,
        legacy_backend_config=_CONFIG,
    )
    out: jax.Array = call(lhs, rhs, lhs_scale, rhs_scale)
    return out


@_product.def_vmap
def _mapped(
    size: int, is_mapped: Sequence[bool], *args: jax.Array
) -> tuple[jax.Array, bool]:
    # JAX's own rule takes only arguments that are all mapped.
    lhs, rhs, lhs_scale, rhs_scale = args
    maps_lhs, maps_rhs = is_mapped[0] or is_mapped[2], is_mapped[1] or is_mapped[3]

    def whole(index: int) -> jax.Array:
        x = args[index]
        return x if is_mapped[index] else jnp.broadcast_to(x, (size, *x.shape))

    if maps_lhs and not maps_rhs:
        # The mapped axis of lhs is one of rows, so that rhs is not repeated.
        left, left_scale = (_merged(whole(index), 1) for index in (0, 2))
        out = _product(left, rhs, left_scale, rhs_scale)
        return _split(out, 1, size), True
    if maps_rhs and not maps_lhs:
        right, right_scale = (_merged(whole(index), 1) for index in (1, 3))
        out = _product(lhs, right, lhs_scale, right_scale)
        return _split(out, 2, size), True
    out = _product(*(_merged(whole(index), 0) for index in range(4)))
    return _split(out, 0, size), True


def _merged(x: jax.Array, axis: int) -> jax.Array:
    """Merges a leading axis into another one of the axes behind it."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _split(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Undoes `_merged`."""
    shape = *x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :]
    return jnp.moveaxis(x.reshape(shape), axis, 0)
