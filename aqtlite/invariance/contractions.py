"""Float contractions whose products are added one by one, in order.

Zeros change nothing wherever they stand, so that padding on any side, and elements that
a mask sets to zero, leave all bits.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from aqtlite.invariance.rounding import mul
from aqtlite.lowering.target import TargetDependent
from aqtlite.shapes.dimension_numbers import DimensionNumbers
from aqtlite.shapes.sharding import replicated_along, zeros_like

UNROLLED = 16
"""Products that are added in one pass over the result."""


@dataclasses.dataclass(frozen=True)
class Dot(TargetDependent):
    """`jax.lax.dot_general` of float32."""

    dimension_numbers: DimensionNumbers

    out_sharding: NamedSharding | None = None

    def reference(self, lhs, rhs):
        return lax.dot_general(
            lhs, rhs, self.dimension_numbers, out_sharding=self.out_sharding
        )

    def lowered(self, target, lhs, rhs):
        del target
        (lc, rc), (lb, rb) = self.dimension_numbers
        lhs, batch, rows = matrices(replicated_along(lhs, lc), lb, lc)
        rhs, _, columns = matrices(replicated_along(rhs, rc), rb, rc)
        out = zeros_like(jax.eval_shape(_product_of_sums, lhs, rhs))
        out = added(out, lhs, rhs).reshape(*batch, *rows, *columns)
        if self.out_sharding is None:
            return out
        return jax.sharding.reshard(out, self.out_sharding)


def added(out, lhs, rhs):
    """Adds the products of two stacks of matrices, one contracted element at a time.

    Args:
        out: what they are added to, ``(batch, rows, columns)``.
        lhs: ``(batch, contracted, rows)``.
        rhs: ``(batch, contracted, columns)``.
    """
    size = lhs.shape[1]
    blocks, rest = divmod(size, UNROLLED)

    def add(block, out):
        start = block * UNROLLED
        return _added(
            out,
            lax.dynamic_slice_in_dim(lhs, start, UNROLLED, 1),
            lax.dynamic_slice_in_dim(rhs, start, UNROLLED, 1),
        )

    if blocks:
        out = lax.fori_loop(0, blocks, add, out)
    return _added(out, lhs[:, size - rest :], rhs[:, size - rest :])


def _added(out, lhs, rhs):
    """Adds the products of some contracted elements, one by one."""
    for i in range(lhs.shape[1]):
        out = out + mul(*jnp.broadcast_arrays(lhs[:, i, :, None], rhs[:, i, None, :]))
    return out


def _product_of_sums(lhs, rhs):
    """An array of the shape and sharding of the result."""
    return lhs.sum(1)[:, :, None] * rhs.sum(1)[:, None, :]


def matrices(x, batch, contracting):
    """Returns an array of shape (batch, contracting, remaining), and sizes of axes."""
    remaining = [i for i in range(x.ndim) if i not in (*batch, *contracting)]
    groups = batch, contracting, remaining
    sizes = [[x.shape[axis] for axis in axes] for axes in groups]
    x = x.transpose(*batch, *contracting, *remaining)
    return x.reshape([math.prod(one) for one in sizes]), sizes[0], sizes[2]
