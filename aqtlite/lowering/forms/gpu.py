"""int8 contractions in the layout and sizes that GPU matrix units support.

cuBLASLt multiplies int8 matrices with their contracting axis last and rows of a
multiple of 4 bytes; it is fast with multiples of 16 (NVIDIA, "cuBLASLt Regular IMMA"
data-layout requirements). XLA hands other matrices to Triton, or transposes them
element by element: on an H100 that takes five times as long as the product, or as long
as the product. Padding with zeros does not change sums.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering import exact
from aqtlite.lowering.forms import layouts, plain
from aqtlite.lowering.target import Target, TargetDependent
from aqtlite.shapes import dimension_numbers as dn

_ALIGNMENT = 16


def is_plain(
    lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...], dims: dn.DimensionNumbers
) -> bool:
    """Returns True if `dot` neither pads nor transposes the operands."""
    (lhs_ca, rhs_ca), (_, rhs_ba) = dims
    columns = dn.remaining_axes(len(rhs_shape), rhs_ca, rhs_ba)
    if _missing(lhs_shape, lhs_ca) or _missing(rhs_shape, columns):
        return False
    sides = (len(lhs_shape), lhs_ca), (len(rhs_shape), rhs_ca)
    is_last = all(layouts.is_last(rank, axes) for rank, axes in sides)
    return is_last or not _is_of_matrices(lhs_shape, rhs_shape, dims)


def dot(
    lhs: jax.Array,
    rhs: jax.Array,
    dims: dn.DimensionNumbers,
    target: Target,
    dtype: np.dtype | None = None,
) -> jax.Array:
    """Contracts int4 and int8 to int32, transposed, and padded to multiples of 16.

    The number of products and the number of rhs's columns are padded, by padding the
    last of their axes. A single row or column is not: a product with a vector needs no
    matrix unit.

    Sums rounded to `dtype` may be fused into the product: Triton writes them in place
    of int32. Others are kept apart, since XLA would have a pass for their conversion.
    """
    lhs, rhs = widened(lhs, target), widened(rhs, target)
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
    lhs, rhs, dims = _contracting_last(lhs, rhs, dims, target)
    out = plain.dot(lhs, rhs, dims)
    if dtype is None:
        out = lax.optimization_barrier(out)
    if target.takes_layouts:  # Transposed, if at all, as they are converted.
        out = layouts.row_major(out)
    out = lax.slice(out, (0,) * out.ndim, shape)
    return out if dtype is None else exact.rounded(out, dtype)


def dot_of_float8(
    lhs: jax.Array,
    rhs: jax.Array,
    dims: dn.DimensionNumbers,
    target: Target,
    precision: lax.PrecisionLike,
    dtype: np.dtype | None = None,
) -> jax.Array:
    """Contracts floats of 8 bits to float32 or `dtype`, transposed as in `dot`.

    cuBLASLt takes the layout of `dot`. XLA transposes operands for it, and pads them,
    but moves transpositions to the floats that are rounded, and writes these.
    """
    lhs, rhs, dims = _contracting_last(lhs, rhs, dims, target)
    return plain.dot(lhs, rhs, dims, precision=precision, dtype=dtype)


def _contracting_last(
    lhs: jax.Array, rhs: jax.Array, dims: dn.DimensionNumbers, target: Target
) -> tuple[jax.Array, jax.Array, dn.DimensionNumbers]:
    """Transposes matrices for cuBLASLt, where a program may contain layouts."""
    if not (target.takes_layouts and _is_of_matrices(lhs.shape, rhs.shape, dims)):
        return lhs, rhs, dims
    (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = dims
    lhs, lhs_ca, lhs_ba = layouts.contracting_last(lhs, lhs_ca, lhs_ba)
    rhs, rhs_ca, rhs_ba = layouts.contracting_last(rhs, rhs_ca, rhs_ba)
    return lhs, rhs, ((lhs_ca, rhs_ca), (lhs_ba, rhs_ba))


def widened(x: jax.Array, target: Target) -> jax.Array:
    """Widens int4 to int8 in memory; returns int8 unchanged.

    XLA:GPU (jax 0.11.2) refuses some fusions that read int4, such as slices of odd
    sizes, and loses integers where it writes int4 transposed.
    """
    if x.dtype == jnp.int8:
        return x
    if target.takes_layouts:
        x = layouts.row_major(x)
    return lax.optimization_barrier(x.astype(jnp.int8))


def converted(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Computes ``x.astype(dtype)``; GPUs widen int4 first (`widened`)."""
    return _OfInt4(dtype)(x) if x.dtype == jnp.int4 else x.astype(dtype)


@dataclasses.dataclass(frozen=True)
class _OfInt4(TargetDependent):
    """A conversion of int4."""

    dtype: np.dtype

    def reference(self, x):
        return x.astype(self.dtype)

    def lowered(self, target, x):
        return self.reference(widened(x, target) if target.is_gpu else x)


def _is_of_matrices(
    lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...], dims: dn.DimensionNumbers
) -> bool:
    """Returns True unless a side has a single row or column."""
    sides = zip((lhs_shape, rhs_shape), *dims, strict=True)
    return all(
        any(shape[axis] != 1 for axis in dn.remaining_axes(len(shape), ca, ba))
        for shape, ca, ba in sides
    )


def _missing(shape: tuple[int, ...], axes: dn.Axes) -> int:
    """The padding of the last axis that aligns the product of the sizes."""
    sizes = [shape[axis] for axis in axes]
    if not all(isinstance(size, int) for size in sizes) or math.prod(sizes) <= 1:
        return 0
    multiple = _ALIGNMENT // math.gcd(_ALIGNMENT, math.prod(sizes[:-1]))
    return -sizes[-1] % multiple


def transposed(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Computes ``x.transpose(axes)`` for any dtype.

    XLA:GPU (jax 0.11.2) loses integers of 4 bits if a kernel writes them in another
    order than it reads them: they are transposed as int8, and narrowed by a separate
    kernel. All platforms take this form, so that analyses of a jaxpr see the
    permutation.
    """
    if x.dtype not in (jnp.int4, jnp.uint4) or not isinstance(x, jax.Array):
        return x.transpose(axes)
    wide = lax.optimization_barrier(x.astype(jnp.int8))
    return lax.optimization_barrier(wide.transpose(axes)).astype(x.dtype)
