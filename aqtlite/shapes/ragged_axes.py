"""Algebra of axes for ragged contractions.

Rows ``m`` are divided into consecutive groups ``g``, each with a matrix of its own.
There are three arrays: x with axes ``mk``, w with ``gkn`` and y with ``mn``. Each of
them, or its gradient, is a contraction of the other two, written as in an einsum:
``y[m,n] = sum_k x[m,k] w[group(m),k,n]`` is ``mk,gkn->mn``, and the gradient of w, a
sum over the rows of each group, is ``mn,mk->gkn``. The last two axes of w may be in
either order.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class RaggedAxes(NamedTuple):
    """The axes of a contraction, one letter for each.

    >>> RaggedAxes("mk", "gkn", "mn").contracted
    'k'
    """

    lhs: str
    rhs: str
    out: str

    @property
    def contracted(self) -> str:
        """The axis that is summed over."""
        shared = set(self.lhs) & set(self.rhs) - set(self.out)
        return shared.pop()

    def exchanged(self) -> "RaggedAxes":
        """The axes with lhs and rhs exchanged."""
        return RaggedAxes(self.rhs, self.lhs, self.out)


def ends_of_groups(sizes: jax.Array, rows: int) -> jax.Array:
    """Returns the row after the end of each group, int32, at most `rows`."""
    return jnp.minimum(jnp.cumsum(sizes.astype(jnp.int32)), rows)


def sizes_between(sizes: jax.Array, start: int, stop: int) -> jax.Array:
    """Returns the number of rows from `start` to `stop` in each group.

    >>> sizes_between(jnp.array([3, 0, 4]), 2, 5).tolist()
    [1, 0, 2]
    """
    ends = jnp.clip(jnp.cumsum(sizes.astype(jnp.int32)), start, stop)
    return jnp.diff(ends, prepend=start)


def are_in_groups(sizes: jax.Array, rows: int) -> jax.Array:
    """Returns, for each row, whether it belongs to a group.

    >>> are_in_groups(jnp.array([2, 0, 1]), 4).tolist()
    [True, True, True, False]
    """
    return jnp.arange(rows, dtype=jnp.int32) < jnp.sum(sizes.astype(jnp.int32))


def group_of_rows(sizes: jax.Array, rows: int) -> jax.Array:
    """Returns the group of each row, int32; the number of groups for rows in none.

    >>> group_of_rows(jnp.array([2, 0, 1]), 4).tolist()
    [0, 0, 2, 3]
    """
    ends = ends_of_groups(sizes, rows)
    row = jnp.arange(rows, dtype=jnp.int32)
    return jnp.sum(row[:, None] >= ends[None], axis=1, dtype=jnp.int32)


def laid_out(
    x: jax.Array, axes: str, wanted: str, sizes: jax.Array, rows: int
) -> jax.Array:
    """Lays out a keepdims array, such as a scale, to multiply an array of other axes.

    Values of groups are gathered to rows; rows after the last group take its value.

    Args:
        x: array of size 1 along the axes that `wanted` lacks.
        axes: letters of the axes of `x`.
        wanted: letters of the axes of the result, with size 1 along axes that `x`
            lacks.
        sizes: sizes of the groups, integers.
        rows: number of rows.
    """
    if "g" in axes and "m" in wanted:
        axis = axes.index("g")
        if x.shape[axis] == 0:
            # There are no groups, and any value will do.
            x = jnp.ones((*x.shape[:axis], 1, *x.shape[axis + 1 :]), x.dtype)
        if x.shape[axis] != 1:
            x = jnp.take(x, group_of_rows(sizes, rows), axis, mode="clip")
        axes = axes.replace("g", "m")
    missing = tuple(i for i, letter in enumerate(axes) if letter not in wanted)
    x, axes = x.squeeze(missing), "".join(one for one in axes if one in wanted)
    ordered = [letter for letter in wanted if letter in axes]
    x = x.transpose([axes.index(letter) for letter in ordered])
    return jnp.expand_dims(x, [i for i, one in enumerate(wanted) if one not in axes])
