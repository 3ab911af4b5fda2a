"""Contractions of floats of 8 bits, which hold fp8, fp6 and fp4.

Every product of two of them is exact in float32, in which they are summed.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from aqtlite import dimension_numbers as dn
from aqtlite.lowering import cpu, plain, processor
from aqtlite.lowering.integer import integer_dot
from aqtlite.lowering.target import TargetDependent
from aqtlite.sharding import before_transposition

Units = tuple[float | None, float | None]
Magnitudes = tuple[int | None, int | None]

_LARGEST_INT8 = 127

# From so many rows and columns on, XLA:CPU has a kernel for bfloat16.
_WORTHWHILE = 16


def narrow_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    dims: dn.DimensionNumbers,
    order: dn.Axes | None = None,
    out_sharding: NamedSharding | None = None,
    units: Units = (None, None),
    largest: Magnitudes = (None, None),
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
    exact = units_of_integers(units, largest)
    return _NarrowDot(dims, order, out_sharding, exact, largest)(lhs, rhs)


def units_of_integers(units: Units, largest: Magnitudes) -> tuple[float, float] | None:
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

    largest: Magnitudes

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
            return self._dot_of_integers(lhs, rhs, self.units)
        is_whole = target.partitions == 1 and self.out_sharding is None
        if is_whole and processor.multiplies_bfloat16():
            out = _dot_in_bfloat16(lhs, rhs, self.dims, self.order)
            if out is not None:
                return out
        return self.reference(lhs.astype(jnp.float32), rhs.astype(jnp.float32))

    def _dot_of_integers(self, lhs, rhs, units):
        left, right = (
            (x.astype(jnp.float32) * np.float32(1 / unit)).astype(jnp.int8)
            for x, unit in zip((lhs, rhs), units, strict=True)
        )
        sums = integer_dot(
            left, right, self.dims, self.order, self.out_sharding, self.largest
        )
        return sums.astype(jnp.float32) * np.float32(math.prod(units))


def _dot_in_bfloat16(
    lhs: jax.Array, rhs: jax.Array, dims: dn.DimensionNumbers, order: dn.Axes | None
) -> jax.Array | None:
    """Contracts matrices as XLA:CPU sums products of bfloat16 in float32.

    That is with lhs's contracting axis last. XLA folds a transposition of the result
    into the dot, and has no kernel for what it makes: the operands are exchanged.

    Returns:
        None where the operands are no such matrices, or the axes of the result lie in
        another order than those of the operands.
    """
    shape = dn.output_shape(dims, lhs.shape, rhs.shape)
    if order not in (None, tuple(range(len(shape)))):
        rank = lhs.ndim - len(dims[0][0])
        if order != (*range(rank, len(shape)), *range(rank)):
            return None
        lhs, rhs, dims = rhs, lhs, dn.transpose(dims)
        shape = dn.output_shape(dims, lhs.shape, rhs.shape)
    matrices = _as_matrices(lhs, rhs, dims)
    if matrices is None:
        return None
    left, right, axis = matrices
    left, right = left.astype(jnp.bfloat16), right.astype(jnp.bfloat16)
    out = plain.dot(left, right, (((1,), (axis,)), ((), ())), jnp.float32)
    return out.reshape(shape)


def _as_matrices(
    lhs: jax.Array, rhs: jax.Array, dims: dn.DimensionNumbers
) -> tuple[jax.Array, jax.Array, int] | None:
    """The operands as matrices, and the contracting axis of rhs; lhs's is the last.

    Returns:
        None for few rows or columns, and where axes would have to be moved.
    """
    (lhs_ca, rhs_ca), (batch, _) = dims
    if batch or not lhs_ca or not cpu.can_reshape(lhs, rhs):
        return None
    products = dn.contraction_size(dims, lhs.shape)
    if products * _WORTHWHILE > min(lhs.size, rhs.size) or not products:
        return None
    sides = _side(lhs, lhs_ca), _side(rhs, rhs_ca)
    if None in sides:
        return None
    if sides[1] == "last":
        right, axis = rhs.reshape(rhs.size // products, products), 1
    else:
        right, axis = rhs.reshape(products, rhs.size // products), 0
    if sides[0] == "last":
        return lhs.reshape(lhs.size // products, products), right, axis
    if not cpu.is_transposed_in_blocks(products):
        return None
    left = cpu.transposed_matrix(lhs.reshape(products, lhs.size // products))
    return left, plain.with_zeros(right, axis, left.shape[1] - products), axis


def _side(x: jax.Array, contracting: dn.Axes) -> str | None:
    """On which side the contracting axes lie, in their order."""
    count = len(contracting)
    if contracting == tuple(range(x.ndim - count, x.ndim)):
        return "last"
    return "first" if contracting == tuple(range(count)) else None
