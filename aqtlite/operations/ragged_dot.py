"""`jax.lax.ragged_dot` as an operation."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite import lowering
from aqtlite.operations.base import Lowered, OperandAxes, Side
from aqtlite.operations.tiled import Tiled
from aqtlite.shapes import ragged_axes
from aqtlite.shapes.dimension_numbers import Axes
from aqtlite.shapes.ragged_axes import RaggedAxes


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["group_sizes"],
    meta_fields=["rows", "axes_of"],
)
@dataclasses.dataclass(frozen=True)
class RaggedDot(lowering.Ragged, Lowered):
    """A `lax.ragged_dot`, or one of its gradients.

    Where one operand has rows and the other has groups, these are their batch axes:
    scales of weights are gathered to rows and to the result. Rows after the last group
    have zero results, and take no part in sums.

    >>> operation = RaggedDot(jnp.array([2, 1]), rows=3)
    >>> operation.axes("rhs").contracting, operation.axes("rhs").batch
    ((1,), (0,))
    >>> operation.gradient("rhs").axes_of
    RaggedAxes(lhs='mn', rhs='mk', out='gkn')
    """

    takes_precision: ClassVar[bool] = False
    takes_sharding: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"ragged_dot_{self.axes_of.lhs}_{self.axes_of.rhs}"

    @property
    def sums_in_groups(self) -> bool:
        return self.axes_of.contracted == "m"

    def output_shape(
        self, lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...]
    ) -> tuple[int, ...]:
        sizes = dict(zip(self.axes_of.rhs, rhs_shape, strict=True))
        sizes |= zip(self.axes_of.lhs, lhs_shape, strict=True)
        sizes["g"] = self.group_sizes.shape[-1]
        return tuple(sizes[letter] for letter in self.axes_of.out)

    def axes(self, side: Side) -> OperandAxes:
        letters = self.letters(side)
        is_paired = "m" in self.axes_of.lhs and "g" in self.axes_of.rhs
        paired = "mg" if is_paired else ""
        contracting, batch, remaining = [], [], []
        for axis, letter in enumerate(letters):
            if letter == self.axes_of.contracted:
                contracting.append(axis)
            elif letter in paired:
                batch.append(axis)
            else:
                remaining.append(axis)
        return OperandAxes(tuple(contracting), tuple(batch), tuple(remaining))

    def ndim(self, side: Side) -> int:
        return len(self.letters(side))

    def gradient(self, side: Side) -> "RaggedDot":
        lhs, rhs, out = self.axes_of
        axes = RaggedAxes(out, rhs, lhs) if side == "lhs" else RaggedAxes(out, lhs, rhs)
        return dataclasses.replace(self, axes_of=axes)

    def in_float(
        self,
        lhs: Any,
        rhs: Any,
        precision: Any,
        preferred_element_type: Any,
        out_sharding: Any,
    ) -> jax.Array:
        sharding = {} if out_sharding is None else {"out_sharding": out_sharding}
        sizes, kind = self.group_sizes, (precision, preferred_element_type)
        return lax.ragged_dot(lhs, rhs, sizes, *kind, **sharding)

    def in_storage(self, side: Side, stored_axes: Axes) -> "RaggedDot | None":
        if side == "lhs" or stored_axes[0] != 0:
            return None
        letters = "".join(
            self.axes_of.rhs[stored_axes.index(axis)] for axis in (0, 1, 2)
        )
        axes = self.axes_of._replace(rhs=letters)
        return dataclasses.replace(self, axes_of=axes)

    def masked(self, x: jax.Array) -> jax.Array:
        is_in_group = ragged_axes.are_in_groups(self.group_sizes, self.rows)
        return jnp.where(is_in_group[:, None], x, 0)

    def rhs_scale_to_lhs(self, scale: jax.Array) -> jax.Array:
        return self.laid_out(scale, self.axes_of.rhs, self.axes_of.lhs)

    def tiled(self, counts: tuple[int, ...]) -> Tiled:
        return Tiled(self.of_tiles(counts), *counts)

    def of_tiles(self, counts: tuple[int, ...]) -> "RaggedDot":
        (count,) = counts
        if self.axes_of.contracted != "m":
            shape = (count, *self.group_sizes.shape)
            return dataclasses.replace(
                self, group_sizes=jnp.broadcast_to(self.group_sizes, shape)
            )
        rows = self.rows // count
        sizes = [
            ragged_axes.sizes_between(self.group_sizes, start, start + rows)
            for start in range(0, self.rows, rows)
        ]
        return dataclasses.replace(self, group_sizes=jnp.stack(sizes), rows=rows)

    def contract(self, kind, lhs, rhs, out_sharding=None):
        if "m" not in self.axes_of.out:
            # Correction terms for zero points would be segment sums over rows.
            return kind(self, lhs.less_zero_point(), rhs.less_zero_point())
        return super().contract(kind, lhs, rhs)
