"""`lax.ragged_dot` and its gradients in the forms of all platforms."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite.lowering import plain, ragged_blocks
from aqtlite.lowering.contraction import Contraction
from aqtlite.lowering.target import Target
from aqtlite.shapes import ragged_axes
from aqtlite.shapes.ragged_axes import RaggedAxes


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["sizes"],
    meta_fields=["axes", "rows"],
)
@dataclasses.dataclass(frozen=True)
class Ragged(Contraction):
    """A `lax.ragged_dot`, or one of its gradients."""

    axes: RaggedAxes
    """Of both operands, and of the result."""

    rows: int
    """How many there are."""

    sizes: jax.Array
    """Of the groups."""

    def anywhere(self, lhs, rhs, precision):
        return self._of_stacks(None, lhs, rhs, self.axes)

    def on_target(self, target, lhs, rhs, precision):
        return self._of_stacks(target, lhs, rhs, self.axes)

    def sums(self, lhs, rhs, precision=None):
        del precision  # Operations of it do not take one.
        return self.sums_of_digits(lhs, rhs, (False, False))[0][0]

    def sums_of_digits(self, lhs, rhs, split):
        """Contracts all digits at once: they are stacked, and so is a single one."""
        left, right = (
            x if is_split else x[None]
            for x, is_split in zip(plain.without_int4(lhs, rhs), split, strict=True)
        )
        sums = super().sums(left, right)
        return [plain.unstacked(row, 0) for row in plain.unstacked(sums, 0)]

    def products(self, lhs, rhs):
        return lhs[self.axes.lhs.index(self.axes.contracted)]

    def pieces(self, lhs, rhs, limit):
        contracted, size = self.axes.contracted, self.products(lhs, rhs)
        step = -(-size // -(-size // limit))
        for start in range(0, size, step):
            stop, piece = min(start + step, size), self
            if contracted == "m":
                sizes = ragged_axes.sizes_between(self.sizes, start, stop)
                piece = Ragged(self.axes, stop - start, sizes)
            lhs_cut, rhs_cut = (
                functools.partial(
                    lax.slice_in_dim,
                    start_index=start,
                    limit_index=stop,
                    axis=letters.index(contracted),
                )
                for letters in self.axes[:2]
            )
            yield piece, lhs_cut, rhs_cut

    def unit_axes(self, side):
        letters = self.axes.lhs if side == "lhs" else self.axes.rhs
        return (letters.index(self.axes.contracted),)

    def unit_to_result(self, side, unit):
        letters = self.axes.lhs if side == "lhs" else self.axes.rhs
        return ragged_axes.laid_out(unit, letters, self.axes.out, self.sizes, self.rows)

    def _of_stacks(
        self, target: Target | None, lhs: jax.Array, rhs: jax.Array, axes: RaggedAxes
    ) -> jax.Array:
        """Contracts each of a stack of lhs with each of a stack of rhs.

        Args:
            target: None for the form that every platform has.
            lhs: stacked along a leading axis.
            rhs: stacked along a leading axis.
            axes: axes of an element of either, and of the result.

        Returns:
            Two new leading axes, of lhs's stack and of rhs's.
        """
        if "m" in axes.rhs and ("m" in axes.out or axes.lhs[1] != axes.out[1]):
            return self._of_stacks(target, rhs, lhs, axes.exchanged()).swapaxes(0, 1)
        if "m" not in axes.out:
            left, right = _side_by_side(lhs, 1), _side_by_side(rhs, 1)
            sums = ragged_blocks.group_sums(target, left, right, self.sizes)
            stacks = (lhs.shape[0], lhs.shape[2]), (rhs.shape[0], rhs.shape[2])
            sums = sums.reshape(sums.shape[0], *stacks[0], *stacks[1])
            return sums.transpose(1, 3, 0, 2, 4)
        contracted = axes.rhs.index(axes.contracted)
        count, column = rhs.shape[0], 3 - contracted
        columns = rhs.shape[1 + column]
        matrices = _side_by_side(rhs, column)
        sums = ragged_blocks.row_products(target, lhs, matrices, self.sizes, contracted)
        sums = sums.reshape(*sums.shape[:2], count, columns)
        return sums.transpose(0, 2, 1, 3)


def _side_by_side(stack: jax.Array, axis: int) -> jax.Array:
    """Joins what is stacked along an axis of its elements."""
    moved = jnp.moveaxis(stack, 0, axis)
    shape = stack.shape[1:]
    joined = (*shape[:axis], stack.shape[0] * shape[axis], *shape[axis + 1 :])
    return moved.reshape(joined)
