"""Float contractions of rows in groups, whose products are added one by one."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite.invariance.contractions import UNROLLED, Dot, matrices
from aqtlite.invariance.rounding import mul
from aqtlite.lowering.target import TargetDependent
from aqtlite.shapes import ragged_axes


@dataclasses.dataclass(frozen=True)
class RaggedDot(TargetDependent):
    """`jax.lax.ragged_dot_general` of float32.

    A row has the bits of a `jax.lax.dot_general` with the matrix of its group. Sizes of
    groups have the batch axes of the operands, or none.
    """

    dimension_numbers: lax.RaggedDotDimensionNumbers

    def reference(self, lhs, rhs, group_sizes):
        return lax.ragged_dot_general(lhs, rhs, group_sizes, self.dimension_numbers)

    def lowered(self, target, lhs, rhs, group_sizes):
        (lc, rc), (lb, rb) = self.dimension_numbers.dot_dimension_numbers
        (ragged,) = self.dimension_numbers.lhs_ragged_dimensions
        if ragged in lb:
            axes = (tuple(lc), tuple(rc)), (tuple(lb), tuple(rb))
            return Dot(axes).lowered(target, lhs, rhs)
        remaining = [i for i in range(lhs.ndim) if i not in (*lb, *lc)]
        along = lc if ragged in lc else remaining
        shape = tuple(lhs.shape[axis] for axis in along)
        place, length = list(along).index(ragged), lhs.shape[ragged]

        def ids_of(sizes):
            """The group of each row, or of each contracted element."""
            ids = ragged_axes.group_of_rows(sizes, length)
            return lax.broadcast_in_dim(ids, shape, (place,)).reshape(-1)

        x, batch, rows = matrices(lhs, lb, lc)
        count = group_sizes.shape[-1]
        sizes = group_sizes.reshape(-1, count)
        sizes = jnp.broadcast_to(sizes, (x.shape[0], count))
        if ragged in lc:
            y, _, columns = matrices(rhs, rb, rc)

            def in_groups(x, y, sizes):
                return _in_groups(x, y, ids_of(sizes), count)

            out = jax.vmap(in_groups, out_axes=1)(x, y, sizes)
            return out.reshape(count, *batch, *rows, *columns)
        (group,) = self.dimension_numbers.rhs_group_dimensions
        rhs = jnp.moveaxis(rhs, group, -1)
        y, _, columns = matrices(rhs, *_without(group, rb, rc))
        y = jnp.moveaxis(y.reshape(*y.shape[:2], -1, count), -1, 2)

        def of_rows(x, y, sizes):
            return _of_rows(x, y, ids_of(sizes))

        return jax.vmap(of_rows)(x, y, sizes).reshape(*batch, *rows, *columns[:-1])


def _without(axis: int, *groups: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns axes after another one was moved to the end."""
    return [tuple(one - (one > axis) for one in axes) for axes in groups]


def _of_rows(lhs, rhs, ids):
    """Contracts each row with the matrix of its group.

    Args:
        lhs: ``(contracted, rows)``.
        rhs: ``(contracted, groups, columns)``.
        ids: the group of each row; the number of groups for rows of none.
    """
    size, count, columns = rhs.shape
    out = jnp.zeros((lhs.shape[1], columns), jnp.float32)
    if count == 0:
        return out

    def add(k, out):
        matrix = lax.dynamic_index_in_dim(rhs, k, keepdims=False)
        row = lax.dynamic_index_in_dim(lhs, k, keepdims=False)
        matrix = jnp.take(matrix, ids, 0, mode="clip")
        return out + mul(*jnp.broadcast_arrays(row[:, None], matrix))

    out = _repeated(size, add, out)
    return jnp.where((ids < count)[:, None], out, 0)


def _in_groups(lhs, rhs, ids, count):
    """Contracts the elements of each group; the first axis of the result is the group.

    Args:
        lhs: ``(contracted, rows)``.
        rhs: ``(contracted, columns)``.
        ids: the group of each contracted element; `count` for elements of none.
        count: number of groups.
    """
    out = jnp.zeros((count + 1, lhs.shape[1], rhs.shape[1]), jnp.float32)

    def add(k, out):
        left = lax.dynamic_index_in_dim(lhs, k, keepdims=False)
        right = lax.dynamic_index_in_dim(rhs, k, keepdims=False)
        old = lax.dynamic_index_in_dim(out, ids[k], keepdims=False)
        new = old + mul(*jnp.broadcast_arrays(left[:, None], right))
        return lax.dynamic_update_index_in_dim(out, new, ids[k], 0)

    return lax.fori_loop(0, lhs.shape[0], add, out)[:count]


def _repeated(
    size: int, add: Callable[[jax.Array, jax.Array], jax.Array], out: jax.Array
) -> jax.Array:
    """Adds the products of all contracted elements, some at a time."""
    blocks = size // UNROLLED

    def add_some(block, out):
        for i in range(UNROLLED):
            out = add(block * UNROLLED + i, out)
        return out

    out = lax.fori_loop(0, blocks, add_some, out) if blocks else out
    for k in range(blocks * UNROLLED, size):
        out = add(jnp.int32(k), out)
    return out
