"""The sums of products of ragged contractions, in the fast form for each platform.

XLA turns a `lax.ragged_dot` into one masked contraction of all rows with all groups,
which multiplies the work by the number of groups. On CPUs and TPUs, a loop here
contracts blocks of rows of one group, with as many steps as the sizes of the groups
need; GPUs, where each step of such a loop waits for the host, keep XLA's form.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite.lowering.forms import cpu, plain
from aqtlite.lowering.target import Target
from aqtlite.shapes import ragged_axes

# Rows in a block: fewer leave matrix units idle, more are padded where groups end.
_FEWEST, _MOST = 16, 256
# The sums of each group are read and written once for every block.
_MOST_SUMMED = 512


def row_products(
    target: Target | None,
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    contracted: int,
) -> jax.Array:
    """Contracts each row with the matrix of its group.

    Args:
        target: target of the program; None for the form that every platform has.
        x: ``(stack, rows, channels)``, int8 or floating.
        w: ``(groups, ...)``, a matrix for each group, of the dtype of `x`.
        sizes: sizes of the groups, ``(groups,)``.
        contracted: contracting axis of `w`, 1 or 2.

    Returns:
        ``(stack, rows, columns)``, int32 or floating; zeros after the last group.
    """
    if target is not None and _runs_in_blocks(target, x, w):
        return _row_products_in_blocks(target, x, w, sizes, contracted)
    if target is not None and target.platform != "cpu":
        each = [_native_row_products(one, w, sizes, contracted) for one in x]
        return jnp.stack(each)
    rows, groups = x.shape[1], w.shape[0]
    group = ragged_axes.group_of_rows(sizes, rows)
    is_own = group[None] == jnp.arange(groups, dtype=jnp.int32)[:, None]
    masked = jnp.where(is_own[:, :, None], jnp.expand_dims(x, 1), 0)
    dims = ((1, 3), (0, contracted)), ((), ())
    return plain.dot(masked, w, dims)


def group_sums(
    target: Target | None, a: jax.Array, b: jax.Array, sizes: jax.Array
) -> jax.Array:
    """Sums the outer products of rows over each group.

    Args:
        target: target of the program; None for the form that every platform has.
        a: ``(rows, p)``, int8 or floating.
        b: ``(rows, q)``, of the dtype of `a`.
        sizes: sizes of the groups, ``(groups,)``.

    Returns:
        ``(groups, p, q)``, int32 or floating.
    """
    if target is not None and _runs_in_blocks(target, a, b, sizes):
        return _group_sums_in_blocks(target, a, b, sizes)
    if target is not None and target.platform != "cpu":
        return _native_group_sums(a, b, sizes)
    group = ragged_axes.group_of_rows(sizes, a.shape[0])
    is_own = group[:, None] == jnp.arange(sizes.shape[0], dtype=jnp.int32)[None]
    masked = jnp.where(is_own[:, :, None], jnp.expand_dims(a, 1), 0)
    b = jnp.where((group < sizes.shape[0])[:, None], b, 0)
    return plain.dot(masked, b, (((0,), (0,)), ((), ())))


def _row_products_in_blocks(target, x, w, sizes, contracted):
    stack, rows, channels = x.shape
    blocks = _Blocks.of(sizes, rows, _MOST)
    size = blocks.size
    dims = ((1,), (contracted - 1,)), ((), ())
    padded = plain.with_zeros(x, 1, size)

    def contract(index, out):
        group, start, _ = blocks.place(index)
        block = lax.dynamic_slice_in_dim(padded, start, size, 1)
        matrix = lax.dynamic_index_in_dim(w, group, keepdims=False)
        block = block.reshape(stack * size, channels)
        products = _dot(target, block, matrix, dims)
        products = products.reshape(stack, size, products.shape[1])
        # The next block overwrites rows after the end of the group.
        return lax.dynamic_update_slice_in_dim(out, products, start, 1)

    shape = (stack, rows + size, w.shape[3 - contracted])
    out = blocks.loop(contract, shape, x)
    is_in_group = ragged_axes.are_in_groups(sizes, rows)
    return jnp.where(is_in_group[:, None], out[:, :rows], 0)


def _group_sums_in_blocks(target, a, b, sizes):
    rows = a.shape[0]
    blocks = _Blocks.of(sizes, rows, _MOST_SUMMED)
    size = blocks.size
    padded = [plain.with_zeros(one, 0, size) for one in (a, b)]

    def add(index, out):
        group, start, own = blocks.place(index)
        is_own = (jnp.arange(size, dtype=jnp.int32) < own)[:, None]
        left, right = (
            jnp.where(is_own, lax.dynamic_slice_in_dim(one, start, size), 0)
            for one in padded
        )
        products = _dot(target, left, right, (((0,), (0,)), ((), ())))
        before = lax.dynamic_index_in_dim(out, group, keepdims=False)
        return lax.dynamic_update_index_in_dim(out, before + products, group, 0)

    shape = (sizes.shape[0], a.shape[1], b.shape[1])
    return blocks.loop(add, shape, a)


def _runs_in_blocks(target: Target, *arrays: jax.Array) -> bool:
    """Returns True if a loop over blocks is faster than XLA's form."""
    is_empty = any(size == 0 for x in arrays for size in x.shape)
    is_whole = target.partitions == 1 and not is_empty
    return is_whole and target.platform in ("cpu", "tpu")


def _dot(target: Target, x: jax.Array, y: jax.Array, dims: Any) -> jax.Array:
    """Contracts two matrices."""
    if target.platform == "cpu" and x.dtype == jnp.int8:
        return cpu.dot(x, y, dims)
    return plain.dot(x, y, dims)


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Blocks of rows, in order, each of one group."""

    size: int
    """Rows of a block. The last block of a group may extend past the group's end."""

    starts: jax.Array
    """First row of each group."""

    ends: jax.Array
    """Row after the end of each group."""

    last: jax.Array
    """Number of blocks up to the end of each group."""

    @classmethod
    def of(cls, sizes: jax.Array, rows: int, most: int) -> "_Blocks":
        """Returns the blocks for groups of these sizes, about as large as a group.

        Args:
            sizes: sizes of the groups.
            rows: number of rows.
            most: largest number of rows in a block.
        """
        size = _FEWEST
        # A symbolic number of rows (`jax.export`) is assumed to be large.
        mean = rows / sizes.shape[0] if isinstance(rows, int) else most
        while size < min(mean, most):
            size *= 2
        ends = ragged_axes.ends_of_groups(sizes, rows)
        starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
        last = jnp.cumsum((ends - starts + (size - 1)) // size)
        return cls(size, starts, ends, last)

    def place(self, index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The group of a block, its first row, and the rows from there in the group."""
        group = jnp.sum(self.last <= index, dtype=jnp.int32)
        blocks_left = self.last[group] - index
        count = (self.ends[group] - self.starts[group] + (self.size - 1)) // self.size
        start = self.starts[group] + (count - blocks_left) * self.size
        return group, start, self.ends[group] - start

    def loop(
        self, step: Callable[[Any, jax.Array], jax.Array], shape: Any, like: jax.Array
    ) -> jax.Array:
        """Runs a step for each block, on an array that starts as zeros."""
        out = lax.full_like(like, 0, plain.accumulator(like), shape)
        return lax.fori_loop(0, self.last[-1], step, out)


_ROWS_BY_MATRICES = tuple(
    lax.RaggedDotDimensionNumbers((((1,), (axis,)), ((), ())), [0], [0])
    for axis in (1, 2)
)
_ROWS_BY_ROWS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


def _native_row_products(x, w, sizes, contracted):
    """Contracts each row with the matrix of its group by `lax.ragged_dot_general`."""

    @jax.custom_batching.custom_vmap
    def dot(x, w, sizes):
        return lax.ragged_dot_general(
            x,
            w,
            sizes,
            _ROWS_BY_MATRICES[contracted - 1],
            precision=_precision(x),
            preferred_element_type=plain.accumulator(x),
        )

    def plainly(x, w, sizes):
        return row_products(None, x[None], w, sizes, contracted)[0]

    return _with_batches(dot, plainly)(x, w, sizes)


def _native_group_sums(a, b, sizes):
    @jax.custom_batching.custom_vmap
    def dot(a, b, sizes):
        return lax.ragged_dot_general(
            a,
            b,
            sizes,
            _ROWS_BY_ROWS,
            precision=_precision(a),
            preferred_element_type=plain.accumulator(a),
        )

    return _with_batches(dot, functools.partial(group_sums, None))(a, b, sizes)


def _precision(x: jax.Array) -> lax.Precision | None:
    """The precision at which sums of products of fp8 are float32 (`Dot.narrow`)."""
    return lax.Precision.HIGHEST if plain.is_float8(x) else None


def _with_batches(dot, plainly):
    """Lets `jax.vmap` map a form that JAX itself only maps over a first axis."""

    @dot.def_vmap
    def _(size, is_batched, *args):
        del size
        axes = tuple(0 if one else None for one in is_batched)
        return jax.vmap(plainly, axes)(*args), True

    return dot
