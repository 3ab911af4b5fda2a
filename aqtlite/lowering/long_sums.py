"""Sums of more products of integers than int32 is certain to hold.

They are cut into pieces whose sums fit, and the exact total is rounded once to float32.
Where devices divide the products, as in the gradients of the weights of a large batch,
they would exchange the partial sums of every piece. There the total is bounded first,
by the norms of the operands (Cauchy and Schwarz): integers that are not all near their
largest magnitude have a total that fits int32, which is exchanged alone. Either way the
result is the same.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering.contraction import Contraction
from aqtlite.lowering.target import TargetDependent

# The number of terms that a sum in float32 may take to lose its own value, at most, if
# each rounding takes half a unit in the last place.
_TERMS = 2**24

_BITS = 16
_LOW = np.int32(2**_BITS - 1)


def of_pieces(
    contraction: Contraction,
    lhs: jax.Array,
    rhs: jax.Array,
    limit: int,
    accumulator: np.dtype | None,
) -> jax.Array:
    """Contracts integers of up to 8 bits.

    Args:
        contraction: the contraction.
        lhs: int4 or int8.
        rhs: int4 or int8.
        limit: number of products whose sum certainly fits int32.
        accumulator: float dtype of the result, in which devices exchange partial sums
            whose total fits int32; None for float32, and exact partial sums.
    """
    leaves, structure = jax.tree.flatten(contraction)
    return _OfPieces(structure, limit, accumulator)(lhs, rhs, *leaves)


@dataclasses.dataclass(frozen=True)
class _OfPieces(TargetDependent):
    """The total of the sums of pieces."""

    is_composite = True

    structure: Any
    """Pytree structure of the contraction."""

    limit: int
    accumulator: np.dtype | None

    def reference(self, lhs, rhs, *leaves):
        contraction = jax.tree.unflatten(self.structure, leaves)
        sums = (
            piece.sums(cut_lhs(lhs), cut_rhs(rhs))
            for piece, cut_lhs, cut_rhs in contraction.pieces(
                lhs.shape, rhs.shape, self.limit
            )
        )
        return self._result(_total(*map(_halves, sums)))

    def lowered(self, target, lhs, rhs, *leaves):
        contraction = jax.tree.unflatten(self.structure, leaves)
        products = contraction.products(lhs.shape, rhs.shape)
        is_whole = target.partitions == 1
        # Devices that exchange sums must take the same branch.
        if is_whole or target.is_partly_mapped or products > _TERMS:
            return self.reference(lhs, rhs, *leaves)
        return lax.cond(
            _certainly_fits(contraction, lhs, rhs, products),
            lambda: self._result(contraction.sums(lhs, rhs)),
            lambda: self.reference(lhs, rhs, *leaves),
        )

    def _result(self, sums: jax.Array) -> jax.Array:
        return sums.astype(self.accumulator or jnp.float32)


def _halves(sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The upper and the lower 16 bits of int32."""
    return sums >> _BITS, sums & _LOW


def _total(*pieces: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Adds int32 given as `_halves`, and rounds the total once to float32."""

    def add(a, b):
        return a[0] + b[0], a[1] + b[1]

    high, low = functools.reduce(add, pieces)
    high, low = high + (low >> _BITS), low & _LOW
    # Both terms are exact, up to totals of 2^40.
    return high.astype(jnp.float32) * np.float32(2**_BITS) + low.astype(jnp.float32)


def _certainly_fits(
    contraction: Contraction, lhs: jax.Array, rhs: jax.Array, products: int
) -> jax.Array:
    """Whether no total leaves int32, by the product of the norms of the operands."""

    def largest_square(side, x):
        squares = jnp.square(x.astype(jnp.float32))
        return jnp.sum(squares, axis=contraction.unit_axes(side)).max()

    found = largest_square("lhs", lhs) * largest_square("rhs", rhs)
    bound = found * np.float32((1 + products / _TERMS) ** 2)
    return bound < np.float32(2**62 * (1 - 2**-20))  # Less than what rounding takes.
