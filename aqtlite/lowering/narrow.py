"""Contractions of floats of 8 bits, which hold fp8, fp6 and fp4.

Every product of two of them is exact in float32, in which they are summed.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from aqtlite.lowering import cpu, digits, exact, plain, processor
from aqtlite.lowering.integer import integer_dot
from aqtlite.lowering.target import TargetDependent
from aqtlite.shapes import dimension_numbers as dn
from aqtlite.shapes.sharding import before_transposition

Units = tuple[float | None, float | None]

_LARGEST_INT8 = 127

# With so many rows and columns XLA:CPU has one kernel for bfloat16, which sums in one
# order whatever the layout; those for fewer do not.
_KERNEL = 16


def narrow_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    dims: dn.DimensionNumbers,
    order: dn.Axes | None = None,
    out_sharding: NamedSharding | None = None,
    units: Units = (None, None),
    largest: digits.Magnitudes = (None, None),
) -> jax.Array:
    """Contracts floats of 8 bits, summed in float32.

    GPUs and TPUs contract them as they are. NVIDIA's matrix units sum products of fp8
    in fewer bits than float32 has, and only at the highest precision does XLA have
    cuBLASLt add such sums up in float32 ("CUBLASLT_MATMUL_DESC_FAST_ACCUM").

    CPUs contract small multiples of a unit as integers, whose sums are exact, and other
    floats in bfloat16 or float32, both of which hold them exactly.

    Args:
        lhs: float8 of any kind.
        rhs: the same, or of another kind.
        dims: canonical dimension numbers.
        order: a permutation of the axes of `lax.dot_general`'s result.
        out_sharding: of the permuted result.
        units: the powers of two of which the values of lhs and rhs are multiples; None
            for unknown.
        largest: the largest magnitudes, in units.
    """
    integers = units_of_integers(units, largest)
    return _NarrowDot(dims, order, out_sharding, integers, largest)(lhs, rhs)


def units_of_integers(
    units: Units, largest: digits.Magnitudes
) -> tuple[float, float] | None:
    """The units in which a CPU contracts such values as integers; None if as floats."""
    (lhs_unit, rhs_unit), (lhs_largest, rhs_largest) = units, largest
    if lhs_unit is None or lhs_largest is None or lhs_largest > _LARGEST_INT8:
        return None
    if rhs_unit is None or rhs_largest is None or rhs_largest > _LARGEST_INT8:
        return None
    return lhs_unit, rhs_unit


@dataclasses.dataclass(frozen=True)
class _NarrowDot(TargetDependent):
    """A contraction of floats of 8 bits."""

    dims: dn.DimensionNumbers
    order: dn.Axes | None
    out_sharding: NamedSharding | None
    units: tuple[float, float] | None
    """None unless int8 holds all values, in units."""

    largest: digits.Magnitudes

    def reference(self, lhs, rhs):
        sharding = self.out_sharding
        if self.order is not None:
            sharding = before_transposition(sharding, self.order)
        precise = lax.Precision.HIGHEST
        out = plain.dot(lhs, rhs, self.dims, jnp.float32, sharding, precise)
        return out if self.order is None else out.transpose(self.order)

    def lowered(self, target, lhs, rhs):
        if target.platform != "cpu":
            return self.reference(lhs, rhs)
        if self.units is not None:
            return as_integers(
                lhs,
                rhs,
                self.units,
                lambda a, b: integer_dot(
                    a, b, self.dims, self.order, self.out_sharding, self.largest
                ),
            )
        is_whole = target.partitions == 1 and self.out_sharding is None
        out = _dot_of_matrices(lhs, rhs, self.dims, self.order) if is_whole else None
        if out is not None:
            return out
        wide = (exact.fusion_barrier(x.astype(jnp.float32)) for x in (lhs, rhs))
        return self.reference(*wide)


def as_integers(
    lhs: jax.Array,
    rhs: jax.Array,
    units: tuple[float, float],
    contract: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Contracts floats as integers, in the units of which they are multiples.

    Args:
        lhs: floating.
        rhs: the same.
        units: of lhs and rhs; int8 holds all values, in units.
        contract: contracts int8, exactly.
    """
    left, right = (
        (x.astype(jnp.float32) * np.float32(1 / unit)).astype(jnp.int8)
        for x, unit in zip((lhs, rhs), units, strict=True)
    )
    sums = contract(left, right)
    return sums.astype(jnp.float32) * np.float32(math.prod(units))


def _dot_of_matrices(
    lhs: jax.Array, rhs: jax.Array, dims: dn.DimensionNumbers, order: dn.Axes | None
) -> jax.Array | None:
    """Contracts operands as matrices, in bfloat16 where XLA:CPU sums that in float32.

    That is with lhs's contracting axis last. XLA folds a transposition of the result
    into the dot, and has no kernel for what it makes: the operands are exchanged.

    Returns:
        None where axes would have to be moved, of the operands or of the result.
    """
    (lhs_ca, rhs_ca), (batch, _) = dims
    if batch or not lhs_ca or not cpu.can_reshape(lhs, rhs):
        return None
    shape = dn.output_shape(dims, lhs.shape, rhs.shape)
    if order not in (None, tuple(range(len(shape)))):
        rank = lhs.ndim - len(lhs_ca)
        if order != (*range(rank, len(shape)), *range(rank)):
            return None
        return _dot_of_matrices(rhs, lhs, dn.transpose(dims), None)
    lhs_axis = _contracting_axis(lhs, lhs_ca)
    rhs_axis = _contracting_axis(rhs, rhs_ca)
    if lhs_axis is None or rhs_axis is None:
        return None
    left, right = _as_matrix(lhs, lhs_ca, lhs_axis), _as_matrix(rhs, rhs_ca, rhs_axis)
    products = left.shape[lhs_axis]
    can_transpose = lhs_axis == 1 or cpu.is_transposed_in_blocks(products)
    rows, columns = left.shape[1 - lhs_axis], right.shape[1 - rhs_axis]
    dtype = jnp.float32
    if products and can_transpose and processor.multiplies_bfloat16():
        dtype = jnp.bfloat16
        if lhs_axis == 0:
            left, lhs_axis = cpu.transposed_matrix(left), 1
            right = plain.with_zeros(right, rhs_axis, left.shape[1] - products)
        left = plain.with_zeros(left, 0, max(0, _KERNEL - rows))
        right = plain.with_zeros(right, 1 - rhs_axis, max(0, _KERNEL - columns))
    left, right = left.astype(dtype), right.astype(dtype)
    if dtype == jnp.float32:
        # The order of its sums depends on the layout of what is fused into the dot.
        left, right = exact.fusion_barrier(left), exact.fusion_barrier(right)
    matmul = ((lhs_axis,), (rhs_axis,)), ((), ())
    out = plain.dot(left, right, matmul, jnp.float32)
    return lax.slice(out, (0, 0), (rows, columns)).reshape(shape)


def _contracting_axis(x: jax.Array, contracting: dn.Axes) -> int | None:
    """The contracting axis of x as a matrix; None if axes would have to be moved."""
    count = len(contracting)
    if contracting == tuple(range(x.ndim - count, x.ndim)):
        return 1
    return 0 if contracting == tuple(range(count)) else None


def _as_matrix(x: jax.Array, contracting: dn.Axes, axis: int) -> jax.Array:
    products = math.prod(x.shape[a] for a in contracting)
    rest = math.prod(n for a, n in enumerate(x.shape) if a not in contracting)
    return x.reshape((products, rest) if axis == 0 else (rest, products))
