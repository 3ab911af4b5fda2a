"""int8 contractions in the sizes that matrix units of GPUs take.

cuBLASLt multiplies int8 matrices whose rows are whole multiples of 4 bytes, and is fast
from 16 on (NVIDIA, "cuBLASLt Regular IMMA" data-layout requirements). XLA pads to 4 by
itself. Zeros add nothing to a sum, so that padding changes no integer.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite.lowering import plain
from aqtlite.shapes import dimension_numbers as dn

_ALIGNMENT = 16


def is_aligned(
    lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...], dims: dn.DimensionNumbers
) -> bool:
    """Returns True if `dot` leaves the operands as they are."""
    (lhs_ca, rhs_ca), (_, rhs_ba) = dims
    columns = dn.remaining_axes(len(rhs_shape), rhs_ca, rhs_ba)
    return not (_missing(lhs_shape, lhs_ca) or _missing(rhs_shape, columns))


def dot(lhs: jax.Array, rhs: jax.Array, dims: dn.DimensionNumbers) -> jax.Array:
    """Contracts int8 with int8 to int32, padded to multiples of 16 and cropped.

    Padded are the number of products and the number of rhs's columns, of which the
    last axis grows. A single column stays: a product with a vector needs no matrix
    unit.
    """
    (lhs_ca, rhs_ca), (_, rhs_ba) = dims
    shape = dn.output_shape(dims, lhs.shape, rhs.shape)
    products = _missing(lhs.shape, lhs_ca)
    if products:
        lhs = plain.with_zeros(lhs, lhs_ca[-1], products)
        rhs = plain.with_zeros(rhs, rhs_ca[-1], products)
    columns = dn.remaining_axes(rhs.ndim, rhs_ca, rhs_ba)
    extra = _missing(rhs.shape, columns)
    if extra:
        rhs = plain.with_zeros(rhs, columns[-1], extra)
    out = plain.dot(lhs, rhs, dims, jnp.int32)
    return lax.slice(out, (0,) * out.ndim, shape)


def _missing(shape: tuple[int, ...], axes: dn.Axes) -> int:
    """By how much the last of the axes has to grow for their product to be aligned."""
    sizes = [shape[axis] for axis in axes]
    if not all(isinstance(size, int) for size in sizes) or math.prod(sizes) <= 1:
        return 0
    multiple = _ALIGNMENT // math.gcd(_ALIGNMENT, math.prod(sizes[:-1]))
    return -sizes[-1] % multiple
