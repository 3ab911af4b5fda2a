"""int8 contractions in the layout that TPU matrix units take at their full rate.

On v5e and v5p, XLA multiplies int8 at twice the rate of bfloat16 if the contracting
axis of lhs is contiguous, and at bfloat16's rate if it is not, as in drhs, which
contracts the rows of both operands. Written transposed, lhs costs less than that where
there are enough columns to multiply it with. v4, v6e and v7 gain nothing. (XLA's
estimates of cycles, of programs compiled by libtpu 0.0.42: ``python -m
benchmarks.tpu_estimate``.)
"""

import math

import jax

from aqtlite.lowering import layouts, plain, processor
from aqtlite.lowering.target import Target
from aqtlite.shapes import dimension_numbers as dn

# Least sizes at which the contraction gains more than the transposition costs.
_PRODUCTS = 1024
_COLUMNS = 2048


def dot(
    lhs: jax.Array, rhs: jax.Array, dims: dn.DimensionNumbers, target: Target
) -> jax.Array:
    """Contracts integers to int32, lhs written transposed where that is faster."""
    (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = dims
    pays = _is_large(lhs.shape, rhs.shape, dims) and processor.tpu_reads_rows()
    if pays and target.takes_layouts:
        lhs, lhs_ca, lhs_ba = layouts.contracting_last(lhs, lhs_ca, lhs_ba)
    return plain.dot(lhs, rhs, ((lhs_ca, rhs_ca), (lhs_ba, rhs_ba)))


def _is_large(
    lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...], dims: dn.DimensionNumbers
) -> bool:
    (lhs_ca, rhs_ca), (_, rhs_ba) = dims
    columns = dn.remaining_axes(len(rhs_shape), rhs_ca, rhs_ba)
    sizes = (
        ([lhs_shape[axis] for axis in lhs_ca], _PRODUCTS),
        ([rhs_shape[axis] for axis in columns], _COLUMNS),
    )
    return all(
        all(isinstance(size, int) for size in found) and math.prod(found) >= least
        for found, least in sizes
    )
