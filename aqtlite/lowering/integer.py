"""Contractions of stored integers, exact on every platform."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from aqtlite.lowering import cpu, digits, gpu, plain
from aqtlite.lowering.target import TargetDependent
from aqtlite.shapes import dimension_numbers as dn
from aqtlite.shapes.sharding import before_transposition


def integer_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    dims: dn.DimensionNumbers,
    order: dn.Axes | None = None,
    out_sharding: NamedSharding | None = None,
    largest: tuple[int | None, int | None] = (None, None),
) -> jax.Array:
    """Contracts stored integers.

    Args:
        lhs: int4, int8, int16, or int32 up to `digits.LARGEST_OF_THREE`.
        rhs: the same.
        dims: canonical dimension numbers.
        order: a permutation of the axes of `lax.dot_general`'s result.
        out_sharding: of the permuted result.
        largest: the largest magnitudes in lhs and rhs; None for that of the dtype,
            without its minimum.

    Returns:
        The exact sums in int32 where int32 is certain to hold them. Otherwise float32:
        exact sums of pieces, or of digits, that int32 does hold, added there.
    """
    largest = lhs_largest, rhs_largest = digits.magnitudes(lhs, rhs, largest)
    if order is not None:
        return _dot_in_order(lhs, rhs, dims, order, out_sharding, largest)
    is_wide = any(jnp.iinfo(x.dtype).bits > 8 for x in (lhs, rhs))
    fitting = (2**31 - 1) // (lhs_largest * rhs_largest)
    piece = (2**31 - 1) // digits.LARGEST**2 if is_wide else fitting
    products = dn.contraction_size(dims, lhs.shape)
    # A symbolic size (jax.export) is taken to fit: it cannot be split.
    is_known = isinstance(products, int)
    if is_known and products > piece:
        return _dot_in_pieces(lhs, rhs, dims, out_sharding, piece, largest)
    if not is_wide:
        return _narrow_dot(lhs, rhs, dims, out_sharding)
    sum_dtype = jnp.float32 if is_known and products > fitting else jnp.int32
    return _wide_dot(lhs, rhs, dims, out_sharding, largest, sum_dtype)


def _wide_dot(lhs, rhs, dims, out_sharding, largest, sum_dtype):
    """Contracts int16 and int32, which no platform does fast, in int8 digits."""
    lhs, rhs = (
        jnp.expand_dims(x, 0)
        if jnp.iinfo(x.dtype).bits <= 8
        else digits.of_integers(x, 2 if one <= digits.LARGEST_OF_TWO else 3)
        for x, one in zip((lhs, rhs), largest, strict=True)
    )
    batch = len(dims[1][0])
    rhs_axis = lhs.ndim - len(dims[0][0])
    if out_sharding is not None:
        out_sharding = with_new_axes(out_sharding, batch, rhs_axis)
    sums = _narrow_dot(lhs, rhs, digits.stacked_dims(dims, lhs=1, rhs=1), out_sharding)
    sums = sums.astype(sum_dtype)
    return digits.combine(digits.combine(sums, rhs_axis), batch)


def with_new_axes(sharding: NamedSharding, *axes: int) -> NamedSharding:
    """The sharding of an array with new axes at these places, which are not sharded."""
    spec = list(sharding.spec)
    for axis in axes:
        spec += [None] * (axis - len(spec))
        spec.insert(axis, None)
    return sharding.update(spec=spec)


def _dot_in_order(lhs, rhs, dims, order, out_sharding, largest):
    """Exchanges the operands where that spares a transposition of the sums."""
    (lhs_ca, rhs_ca), (batch, _) = dims
    lhs_rank = lhs.ndim - len(lhs_ca)
    rhs_rank = rhs.ndim - len(rhs_ca) - len(batch)
    if rhs_rank and len(batch) <= order[-1] < lhs_rank:
        lhs, rhs, dims, largest = rhs, lhs, dn.transpose(dims), largest[::-1]
        axes = range(lhs_rank + rhs_rank)
        exchanged = [
            *axes[: len(batch)],
            *axes[lhs_rank:],
            *axes[len(batch) : lhs_rank],
        ]
        order = tuple(exchanged.index(axis) for axis in order)
    out_sharding = before_transposition(out_sharding, order)
    out = integer_dot(lhs, rhs, dims, out_sharding=out_sharding, largest=largest)
    return out.transpose(order)


def _narrow_dot(lhs, rhs, dims, out_sharding):
    """Contracts int4 and int8, in a form that each platform has, and runs fast."""
    # On every platform, the plain form is the fast one.
    is_plain = (
        jnp.int4 not in (lhs.dtype, rhs.dtype)
        and (out_sharding is not None or cpu.is_fast(lhs.shape, rhs.shape, dims))
        and (out_sharding is not None or gpu.is_aligned(lhs.shape, rhs.shape, dims))
    )
    if is_plain:
        return plain.dot(lhs, rhs, dims, jnp.int32, out_sharding)
    return _NarrowDot(dims, out_sharding)(lhs, rhs)


@dataclasses.dataclass(frozen=True)
class _NarrowDot(TargetDependent):
    """A contraction of int4 and int8."""

    dims: dn.DimensionNumbers
    out_sharding: NamedSharding | None

    def reference(self, lhs, rhs):
        # XLA's CPU and GPU backends have no int4 x int4 contraction.
        return self._plain(lhs.astype(jnp.int8), rhs.astype(jnp.int8))

    def lowered(self, target, lhs, rhs):
        if target.platform == "tpu" and lhs.dtype == rhs.dtype:
            return self._plain(lhs, rhs)
        # Padding and reshaping would need shardings of their own.
        is_whole = target.partitions == 1 and self.out_sharding is None
        if target.platform == "tpu" or not is_whole:
            return self.reference(lhs, rhs)
        if target.platform == "cpu" and cpu.holds_pairs(lhs, rhs, self.dims):
            return cpu.dot_of_pairs(lhs, rhs, self.dims)
        dot = cpu.dot if target.platform == "cpu" else gpu.dot
        return dot(lhs.astype(jnp.int8), rhs.astype(jnp.int8), self.dims)

    def _plain(self, lhs, rhs):
        return plain.dot(lhs, rhs, self.dims, jnp.int32, self.out_sharding)


def _dot_in_pieces(lhs, rhs, dims, out_sharding, piece, largest):
    """Splits the longest contracting axis so that every piece fits int32."""
    (lhs_ca, rhs_ca), _ = dims
    which = int(np.argmax([lhs.shape[axis] for axis in lhs_ca]))
    lhs_axis, rhs_axis = lhs_ca[which], rhs_ca[which]
    size = lhs.shape[lhs_axis]
    others = dn.contraction_size(dims, lhs.shape) // size
    count = -(-size // max(1, piece // others))
    step = -(-size // count)
    total = None
    for start in range(0, size, step):
        stop = min(start + step, size)
        part = integer_dot(
            lax.slice_in_dim(lhs, start, stop, axis=lhs_axis),
            lax.slice_in_dim(rhs, start, stop, axis=rhs_axis),
            dims,
            out_sharding=out_sharding,
            largest=largest,
        ).astype(jnp.float32)
        total = part if total is None else total + part
    return total
