"""`lax.ragged_dot` and its gradients in the forms of all platforms."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite.lowering.contraction import Contraction
from aqtlite.lowering.forms import plain, ragged_blocks
from aqtlite.lowering.target import Target
from aqtlite.shapes import ragged_axes
from aqtlite.shapes.dimension_numbers import Side
from aqtlite.shapes.ragged_axes import RaggedAxes


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["group_sizes"],
    meta_fields=["rows", "axes_of"],
)
@dataclasses.dataclass(frozen=True)
class Ragged(Contraction):
    """A `lax.ragged_dot`, or one of its gradients."""

    group_sizes: jax.Array
    """Number of rows of each group, integers."""

    rows: int
    """Number of rows."""

    axes_of: RaggedAxes = RaggedAxes("mk", "gkn", "mn")
    """Axes of both operands and of the result."""

    def anywhere(self, lhs, rhs, precision):
        return self._of_stacks(None, lhs, rhs, self.axes_of)

    def on_target(self, target, lhs, rhs, precision):
        if plain.is_float8(lhs) and target.platform != "cuda":
            lhs, rhs = lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16)
        return self._of_stacks(target, lhs, rhs, self.axes_of)

    def sums(self, lhs, rhs, precision=None):
        del precision  # A quantized `ragged_dot` takes no precision.
        return self.sums_of_digits(lhs, rhs, (False, False))[0][0]

    def sums_of_digits(self, lhs, rhs, split):
        """Contracts all digits at once, stacked along a leading axis."""
        left, right = (
            x if is_split else x[None]
            for x, is_split in zip(plain.without_int4(lhs, rhs), split, strict=True)
        )
        sums = super().sums(left, right)
        return [plain.unstacked(row, 0) for row in plain.unstacked(sums, 0)]

    def narrow(self, lhs, rhs, dtype=None):
        """Contracts floats of 8 bits, on CUDA as they are; bfloat16 holds them."""
        return self.sums_in(dtype, lhs, rhs)

    def products(self, lhs, rhs):
        return lhs[self.axes_of.lhs.index(self.axes_of.contracted)]

    def pieces(self, lhs, rhs, limit):
        contracted, size = self.axes_of.contracted, self.products(lhs, rhs)
        step = -(-size // -(-size // limit))
        for start in range(0, size, step):
            stop, piece = min(start + step, size), self
            if contracted == "m":
                sizes = ragged_axes.sizes_between(self.group_sizes, start, stop)
                piece = Ragged(sizes, stop - start, self.axes_of)
            lhs_cut, rhs_cut = (
                functools.partial(
                    lax.slice_in_dim,
                    start_index=start,
                    limit_index=stop,
                    axis=letters.index(contracted),
                )
                for letters in self.axes_of[:2]
            )
            yield piece, lhs_cut, rhs_cut

    def unit_axes(self, side):
        letters = self.letters(side)
        return (letters.index(self.axes_of.contracted),)

    def scale_to_output(self, side, scale):
        return self.laid_out(scale, self.letters(side), self.axes_of.out)

    def letters(self, side: Side) -> str:
        """The letters of the axes of an operand."""
        return self.axes_of.lhs if side == "lhs" else self.axes_of.rhs

    def laid_out(self, scale: jax.Array, axes: str, wanted: str) -> jax.Array:
        """Lays out a scale of an array with axes `axes` for one with axes `wanted`."""
        return ragged_axes.laid_out(scale, axes, wanted, self.group_sizes, self.rows)

    def _of_stacks(
        self, target: Target | None, lhs: jax.Array, rhs: jax.Array, axes: RaggedAxes
    ) -> jax.Array:
        """Contracts each array of a stack of lhs with each of a stack of rhs.

        Args:
            target: target of the program; None for the form that every platform has.
            lhs: arrays stacked along a leading axis.
            rhs: arrays stacked along a leading axis.
            axes: axes of an array of either stack, and of the result.

        Returns:
            The sums, with two leading axes for the stacks of lhs and rhs.
        """
        if "m" in axes.rhs and ("m" in axes.out or axes.lhs[1] != axes.out[1]):
            return self._of_stacks(target, rhs, lhs, axes.exchanged()).swapaxes(0, 1)
        if "m" not in axes.out:
            left, right = _side_by_side(lhs, 1), _side_by_side(rhs, 1)
            sums = ragged_blocks.group_sums(target, left, right, self.group_sizes)
            stacks = (lhs.shape[0], lhs.shape[2]), (rhs.shape[0], rhs.shape[2])
            sums = sums.reshape(sums.shape[0], *stacks[0], *stacks[1])
            return sums.transpose(1, 3, 0, 2, 4)
        contracted = axes.rhs.index(axes.contracted)
        count, column = rhs.shape[0], 3 - contracted
        columns = rhs.shape[1 + column]
        matrices = _side_by_side(rhs, column)
        sums = ragged_blocks.row_products(
            target, lhs, matrices, self.group_sizes, contracted
        )
        sums = sums.reshape(*sums.shape[:2], count, columns)
        return sums.transpose(0, 2, 1, 3)


def _side_by_side(stack: jax.Array, axis: int) -> jax.Array:
    """Concatenates the arrays of a stack along one of their axes."""
    moved = jnp.moveaxis(stack, 0, axis)
    shape = stack.shape[1:]
    joined = (*shape[:axis], stack.shape[0] * shape[axis], *shape[axis + 1 :])
    return moved.reshape(joined)
