"""The sums of products of queries or probabilities with a KV cache of few bits.

A kernel reads the planes of bytes (`plane_products`). XLA would write all integers of
the cache first, at twice its bytes or more.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from aqtlite.contraction import accumulation
from aqtlite.contraction.execution import ContractionExecution
from aqtlite.lowering import Dot, DotInput
from aqtlite.lowering.forms import plane_products
from aqtlite.qtensor.packed_planes import PackedPlanes
from aqtlite.qtensor.qtensor import Operand, QTensor
from aqtlite.shapes import dimension_numbers as dn

_LARGEST_SUM = 2**31 - 1


def by_kernel(
    how: ContractionExecution,
    operation: Any,
    lhs: tuple[Operand, QTensor | None],
    rhs_q: Any,
) -> jax.Array | None:
    """Sums by the kernel; None if other forms take less time, or it lacks the kind.

    Args:
        how: execution of the contraction.
        operation: a `Dot`.
        lhs: left operand, and that quantized.
        rhs_q: right operand, of `PackedPlanes`.
    """
    if how.kind not in ("integers", "integers in float") or how.has_blocks:
        return None
    left = accumulation.dot_input(how, operation, "lhs", *lhs)
    if not _takes(operation, left, rhs_q.qvalue):
        return None
    sums = _sums(operation, left.values, rhs_q.qvalue)
    return sums if how.kind == "integers" else sums.astype(jnp.float32)


def _takes(operation: Dot, lhs: DotInput, rhs: PackedPlanes) -> bool:
    """Whether the kernel contracts operands, each matrix of planes with its rows."""
    (_, rhs_ca), (lhs_ba, rhs_ba) = operation.dims
    is_matrices = rhs_ba == tuple(range(rhs.ndim - 2)) and len(rhs_ca) == 1
    if not is_matrices or lhs.zero_point is not None:
        return False
    if lhs.values.dtype not in (jnp.int4, jnp.int8) or 0 in rhs.shape:
        return False
    products = rhs.shape[rhs_ca[0]]
    is_exact = products * 2 ** (7 + rhs.bits - 1) <= _LARGEST_SUM
    batch = math.prod(lhs.values.shape[axis] for axis in lhs_ba)
    rows = lhs.values.size // (products * batch)
    return is_exact and plane_products.pays(rows, rhs.shape[-1])


def _sums(operation: Dot, lhs: jax.Array, rhs: PackedPlanes) -> jax.Array:
    """The sums, int32, laid out as the result of the contraction."""
    (lhs_ca, rhs_ca), (lhs_ba, _) = operation.dims
    remaining = dn.remaining_axes(lhs.ndim, lhs_ca, lhs_ba)
    *batch, channels, length = rhs.shape
    rows = [lhs.shape[axis] for axis in remaining]
    count = math.prod(batch)
    x = lhs.astype(jnp.int8).transpose(*lhs_ba, *remaining, *lhs_ca)
    x = x.reshape(count, math.prod(rows), rhs.shape[rhs_ca[0]])
    packed = rhs.packed.reshape(count, -1, length)
    if rhs_ca == (rhs.ndim - 1,):
        out = plane_products.of_positions(x, packed, channels, rhs.bits)
    else:
        out = plane_products.of_channels(x, packed, rhs.bits)
    return operation.ordered(out.reshape(*batch, *rows, out.shape[-1]))
