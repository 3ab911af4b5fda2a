"""Layouts of arrays in memory, for matrix units that take only some fast.

Only programs for one device take them: see `target.Target.takes_layouts`.
"""

import jax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from aqtlite.shapes import dimension_numbers as dn


def row_major(x: jax.Array) -> jax.Array:
    """Lays an array out with its last axis contiguous."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def contracting_last(
    x: jax.Array, contracting: dn.Axes, batch: dn.Axes
) -> tuple[jax.Array, dn.Axes, dn.Axes]:
    """Moves an operand's contracting axes last, in memory, too.

    XLA would choose one layout for an array that two contractions share, fold the
    transposition into one of them, and transpose the floats before rounding. With both
    layouts given, rounding writes the integers in both, and the barrier keeps the
    transposition out of the contraction.

    Returns:
        The operand, and its new contracting and batch axes.
    """
    if is_last(x.ndim, contracting):
        return x, contracting, batch
    order = (*batch, *dn.remaining_axes(x.ndim, contracting, batch), *contracting)
    axes = tuple(range(x.ndim))
    x = lax.optimization_barrier(row_major(row_major(x).transpose(order)))
    return x, axes[x.ndim - len(contracting) :], axes[: len(batch)]


def is_last(rank: int, contracting: dn.Axes) -> bool:
    """Returns True if the contracting axes are the last ones, in their order."""
    return contracting == tuple(range(rank - len(contracting), rank))
