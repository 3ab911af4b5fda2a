"""`lax.dot_general` in the forms of all platforms."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from aqtlite.lowering import digits
from aqtlite.lowering.contraction import Contraction
from aqtlite.lowering.forms import (
    cpu,
    gpu,
    narrow,
    packed_dot,
    pairs,
    panel_products,
    plain,
    scaled_panel_products,
    tpu,
)
from aqtlite.shapes import dimension_numbers as dn
from aqtlite.shapes.sharding import before_transposition

# Up to this number of sums of digits are kept at once; more would leave the cache.
_FEW_SUMS = 2**21

# The number of sums in a block of rows, and the minimum of rows in a block, so that rhs
# is not read too often.
_BLOCK_SUMS = 2**19
_BLOCK_ROWS = 128


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[],
    meta_fields=["dims", "lhs_ndim", "rhs_ndim", "order", "out_sharding"],
)
@dataclasses.dataclass(frozen=True)
class Dot(Contraction):
    """A `lax.dot_general`."""

    dims: dn.DimensionNumbers
    """Canonical dimension numbers."""

    lhs_ndim: int
    rhs_ndim: int
    order: dn.Axes | None = None
    """Permutation of the axes of `lax.dot_general`'s result; None for none."""

    out_sharding: NamedSharding | None = None
    """Sharding of the permuted result."""

    @property
    def lhs_rank(self) -> int:
        """The number of axes of lhs in the result."""
        return self.lhs_ndim - len(self.dims[0][0])

    def ordered(self, out: jax.Array) -> jax.Array:
        """Returns a result of `lax.dot_general` with its axes in `order`."""
        return out if self.order is None else out.transpose(self.order)

    def anywhere(self, lhs, rhs, precision):
        lhs, rhs = plain.without_int4(lhs, rhs)
        return self._plain(lhs, rhs, precision)

    def on_target(self, target, lhs, rhs, precision):
        # Padding and reshaping would need shardings of their own.
        is_whole = target.partitions == 1 and self.out_sharding is None
        if target.platform == "tpu" and (_is_float(lhs) or lhs.dtype == rhs.dtype):
            if not is_whole:
                return self._plain(lhs, rhs, precision)
            return tpu.dot(lhs, rhs, self.dims, target, precision)
        if target.is_gpu and is_whole and plain.is_float8(lhs):
            return gpu.dot_of_float8(lhs, rhs, self.dims, target, precision)
        if _is_float(lhs) or target.platform == "tpu" or not is_whole:
            return self.anywhere(lhs, rhs, precision)
        if target.is_gpu:
            return gpu.dot(lhs, rhs, self.dims, target)
        if target.platform != "cpu":
            return self.anywhere(lhs, rhs, precision)
        dims = self.dims
        if rhs.dtype == jnp.int4:
            lhs, rhs, dims = cpu.merged(lhs, rhs, dims)
        has_kernel = panel_products.is_available(target)
        if has_kernel and panel_products.has_fast_sums(lhs, rhs, dims):
            return panel_products.sums(lhs, rhs, dims)
        if pairs.has_fast_form(lhs, rhs, dims):
            return pairs.dot(lhs, rhs, dims)
        lhs, rhs = plain.without_int4(lhs, rhs)
        return cpu.dot(lhs, rhs, dims)

    def sums(self, lhs, rhs, precision=None):
        if self.order is not None:
            return self.ordered(self._unordered().sums(lhs, rhs, precision))
        if self._is_plain(lhs, rhs):
            return self._plain(lhs, rhs, precision)
        return super().sums(lhs, rhs, precision)

    def rounded_on_gpu(self, target, dtype, lhs, rhs, precision):
        """Has the product round its sums as it writes them.

        GPUs have such products of bfloat16 and of floats of 8 bits, to bfloat16.
        """
        if self.order is not None:
            dot = self._unordered()
            out = dot.rounded_on_gpu(target, dtype, lhs, rhs, precision)
            return self.ordered(out)
        is_whole = target.partitions == 1 and self.out_sharding is None
        if is_whole and not _is_float(lhs):
            return gpu.dot(lhs, rhs, self.dims, target, dtype)
        is_narrow = lhs.dtype == jnp.bfloat16 or plain.is_float8(lhs)
        if dtype != jnp.bfloat16 or not is_narrow:
            return super().rounded_on_gpu(target, dtype, lhs, rhs, precision)
        if is_whole and plain.is_float8(lhs):
            return gpu.dot_of_float8(lhs, rhs, self.dims, target, precision, dtype)
        return plain.dot(lhs, rhs, self.dims, self.out_sharding, precision, dtype)

    def sums_of_digits(self, lhs, rhs, split):
        """Contracts all digits at once, as remaining axes."""
        if not any(split):
            return [[self.sums(lhs, rhs)]]
        if self.order is not None:
            rows = self._unordered().sums_of_digits(lhs, rhs, split)
            return [list(map(self.ordered, row)) for row in rows]
        sums = self._of_digits(split).sums(lhs, rhs)
        lhs_axis, rhs_axis = len(self.dims[1][0]), self.lhs_rank
        rows = plain.unstacked(sums, lhs_axis) if split[0] else [sums]
        return [plain.unstacked(x, rhs_axis) if split[1] else [x] for x in rows]

    def mapped(self, axes):
        """An axis of both operands is a batch axis, one of a single operand remains."""
        if self.order is not None or self.out_sharding is not None:
            return None
        dims = contracting, batch = dn.behind_new_axes(self.dims, *axes)
        ndims = self.lhs_ndim + axes[0], self.rhs_ndim + axes[1]
        if all(axes):
            dims = contracting, ((0, *batch[0]), (0, *batch[1]))
            return Dot(dims, *ndims), 0
        return Dot(dims, *ndims), len(batch[0]) if axes[0] else self.lhs_rank

    def in_best_order(self, lhs, rhs):
        """Exchanges the operands where that saves a transposition of the sums."""
        (_, rhs_ca), (batch, _) = self.dims
        first, rank = len(batch), self.lhs_rank
        is_row = self.rhs_ndim == len(rhs_ca) + first
        if self.order is None or is_row or not first <= self.order[-1] < rank:
            return self, lhs, rhs
        axes = list(range(len(self.order)))
        exchanged = axes[:first] + axes[rank:] + axes[first:rank]
        order = tuple(exchanged.index(axis) for axis in self.order)
        dims, ndims = dn.transpose(self.dims), (self.rhs_ndim, self.lhs_ndim)
        return Dot(dims, *ndims, order, self.out_sharding), rhs, lhs

    def packing(self, known, lhs, rhs):
        is_plain = self.order is None and self.out_sharding is None
        return packed_dot.of_dot(lhs, rhs, self.dims, known) if is_plain else None

    def products(self, lhs, rhs):
        return dn.contraction_size(self.dims, lhs)

    def pieces(self, lhs, rhs, limit):
        """Cuts the longest contracting axis."""
        (lhs_ca, rhs_ca), _ = self.dims
        which = int(np.argmax([lhs[axis] for axis in lhs_ca]))
        size = lhs[lhs_ca[which]]
        others = self.products(lhs, rhs) // size
        count = -(-size // max(1, limit // others))
        step = -(-size // count)
        for start in range(0, size, step):
            stop = min(start + step, size)
            lhs_cut, rhs_cut = (
                functools.partial(
                    lax.slice_in_dim, start_index=start, limit_index=stop, axis=axis
                )
                for axis in (lhs_ca[which], rhs_ca[which])
            )
            yield self, lhs_cut, rhs_cut

    def by_blocks(self, contract, lhs, rhs):
        """Contracts blocks of rows of lhs in a loop.

        The sums of three digits take three times the memory of the result; those of one
        block stay in the cache until they are combined. If blocks do not divide the
        rows, the last block overlaps the one before: the sums of rows are independent.
        """
        if not self._has_large_sums(lhs, rhs):
            return contract(self, lhs, rhs)
        (_, rhs_ca), _ = self.dims
        shape = dn.output_shape(self.dims, lhs.shape, rhs.shape)
        rank = self.lhs_rank
        rows, columns = math.prod(shape[:rank]), math.prod(shape[rank:])
        size = max(_BLOCK_ROWS, _BLOCK_SUMS // (3 * columns))
        blocks = -(-rows // size)
        size = -(-rows // blocks)
        stack = lhs.values.reshape(-1, rows, *lhs.shape[rank:])
        if rhs.values.dtype == jnp.int4:  # Widened once.
            rhs = dataclasses.replace(rhs, values=rhs.values.astype(jnp.int8))
        products = tuple(range(1, stack.ndim - 1))
        dot = Dot(((products, rhs_ca), ((), ())), stack.ndim - 1, self.rhs_ndim)

        def insert(index, out):
            start = jnp.minimum(index * size, rows - size)
            block = lax.dynamic_slice_in_dim(stack, start, size, axis=1)
            part = contract(dot, dataclasses.replace(lhs, values=block), rhs)
            return lax.dynamic_update_slice_in_dim(out, part, start, axis=0)

        start = lax.full_like(stack, 0, jnp.float32, (rows, *shape[rank:]))
        out = lax.fori_loop(0, blocks, insert, start)
        return self.ordered(out.reshape(shape))

    def sums_of_floats(self, target, lhs, rhs, out_dtype):
        lhs, rhs, dims = cpu.merged(lhs, rhs, self.dims)
        suits_kernel = panel_products.takes_scaled(lhs, rhs, dims)
        is_split = self.out_sharding is not None
        if not suits_kernel or is_split or not panel_products.is_available(target):
            return None
        return self.ordered(
            scaled_panel_products.sums_of_floats(lhs, rhs, dims, out_dtype)
        )

    def unit_axes(self, side):
        return self.dims[0][0 if side == "lhs" else 1]

    def scale_to_output(self, side, scale):
        return self.ordered(
            dn.scale_to_output(side, scale, self.dims, self.lhs_ndim, self.rhs_ndim)
        )

    def narrow(self, lhs, rhs, dtype=None):
        """Contracts floats of 8 bits without widening them.

        NVIDIA's matrix units sum fp8 products in fewer bits than float32 has; only at
        the highest precision does XLA have cuBLASLt accumulate such sums in float32
        ("CUBLASLT_MATMUL_DESC_FAST_ACCUM").
        """
        return self.sums_in(dtype, lhs, rhs, lax.Precision.HIGHEST)

    def narrow_on_cpu(self, lhs, rhs, is_whole):
        """Contracts floats of 8 bits, in bfloat16 where that is faster than float32."""
        if is_whole and self.out_sharding is None:
            out = narrow.dot_of_matrices(lhs, rhs, self.dims, self.order)
            if out is not None:
                return out
        return super().narrow_on_cpu(lhs, rhs, is_whole)

    def _plain(
        self, lhs: jax.Array, rhs: jax.Array, precision: lax.PrecisionLike
    ) -> jax.Array:
        return plain.dot(lhs, rhs, self.dims, self.out_sharding, precision)

    def _is_plain(self, lhs: jax.Array, rhs: jax.Array) -> bool:
        """Returns True if every target takes the plain form."""
        shapes = lhs.shape, rhs.shape
        if _is_float(lhs):
            is_fast = tpu.few_rows(shapes, lhs.dtype, self.dims) is None
            if plain.is_float8(lhs):
                is_fast = is_fast and gpu.is_plain(*shapes, self.dims)
            return cpu.sums_halves(lhs, rhs, self.dims) and is_fast
        if jnp.int4 in (lhs.dtype, rhs.dtype) or panel_products.sums_bytes():
            return False
        is_fast = (
            cpu.is_fast(*shapes, self.dims)
            and gpu.is_plain(*shapes, self.dims)
            and tpu.few_rows(shapes, lhs.dtype, self.dims) is None
        )
        return is_fast or self.out_sharding is not None

    def _unordered(self) -> "Dot":
        if self.order is None:
            return self
        sharding = before_transposition(self.out_sharding, self.order)
        return dataclasses.replace(self, order=None, out_sharding=sharding)

    def _of_digits(self, split: tuple[bool, bool]) -> "Dot":
        """The contraction of operands with digits on a leading axis; no `order`."""
        at = len(self.dims[1][0]), self.lhs_rank + split[0]
        new = [axis for axis, is_new in zip(at, split, strict=True) if is_new]
        sharding = self.out_sharding
        return Dot(
            dn.behind_new_axes(self.dims, *split),
            self.lhs_ndim + split[0],
            self.rhs_ndim + split[1],
            out_sharding=None if sharding is None else _with_new_axes(sharding, new),
        )

    def _has_large_sums(self, lhs: digits.Digits, rhs: digits.Digits) -> bool:
        """Returns True if a loop over blocks of rows is faster for digits of floats."""
        (lhs_ca, _), (batch, _) = self.dims
        rank = self.lhs_rank
        is_last = lhs_ca == tuple(range(rank, self.lhs_ndim)) and not batch
        is_whole = self.out_sharding is None and cpu.can_reshape(lhs.values, rhs.values)
        if lhs.unit is None or not is_last or not is_whole:
            return False
        shape = dn.output_shape(self.dims, lhs.shape, rhs.shape)
        has_rows = math.prod(shape[:rank]) > _BLOCK_ROWS
        return has_rows and 3 * math.prod(shape) > _FEW_SUMS


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _with_new_axes(sharding: NamedSharding, axes: list[int]) -> NamedSharding:
    """Adds unsharded axes to a sharding at these positions."""
    spec = list(sharding.spec)
    for axis in axes:
        spec += [None] * (axis - len(spec))
        spec.insert(axis, None)
    return sharding.update(spec=spec)
