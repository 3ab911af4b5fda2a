"""`jax.lax.dot_general` as an operation."""

import dataclasses
import functools
import string
from typing import Any, ClassVar

import jax
from jax import lax

from aqtlite import lowering
from aqtlite.operations.base import Lowered, OperandAxes, Side
from aqtlite.shapes import dimension_numbers as dn


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[],
    meta_fields=["dims", "lhs_ndim", "rhs_ndim", "order", "out_sharding"],
)
@dataclasses.dataclass(frozen=True)
class DotGeneral(lowering.Dot, Lowered):
    """A `lax.dot_general` with these dimension numbers.

    >>> matmul = DotGeneral((((1,), (0,)), ((), ())), 2, 2)
    >>> matmul.axes("rhs")
    OperandAxes(contracting=(0,), batch=(), remaining=(1,), window=(), groups=1)
    >>> matmul.gradient("lhs").dims
    (((1,), (1,)), ((), ()))
    """

    pairs_elements: ClassVar[bool] = True

    @classmethod
    def of(cls, dimension_numbers: Any, lhs_shape: Any, rhs_shape: Any) -> "DotGeneral":
        """Returns the contraction of operands of these shapes.

        >>> DotGeneral.of((([1], [0]), ([], [])), (2, 3), (3, 4)).name
        'dot_general_ab_bc'

        Args:
            dimension_numbers: as in `lax.dot_general`.
            lhs_shape: shape of lhs.
            rhs_shape: shape of rhs.

        Raises:
            ValueError: if the dimension numbers do not fit the shapes.
            TypeError: if `dimension_numbers` is not nested as in `lax.dot_general`.
        """
        dims = dn.canonicalize(dimension_numbers, lhs_shape, rhs_shape)
        return cls(dims, len(lhs_shape), len(rhs_shape))

    @property
    def name(self) -> str:
        letters = iter(string.ascii_letters)
        lhs = [next(letters) for _ in range(self.lhs_ndim)]
        (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = self.dims
        paired = dict(zip(rhs_ca + rhs_ba, lhs_ca + lhs_ba, strict=True))
        rhs = [
            lhs[paired[axis]] if axis in paired else next(letters)
            for axis in range(self.rhs_ndim)
        ]
        return f"dot_general_{''.join(lhs)}_{''.join(rhs)}"

    def output_shape(
        self, lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...]
    ) -> tuple[int, ...]:
        shape = dn.output_shape(self.dims, lhs_shape, rhs_shape)
        return shape if self.order is None else tuple(shape[a] for a in self.order)

    def axes(self, side: Side) -> OperandAxes:
        (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = self.dims
        if side == "lhs":
            ndim, contracting, batch = self.lhs_ndim, lhs_ca, lhs_ba
        else:
            ndim, contracting, batch = self.rhs_ndim, rhs_ca, rhs_ba
        remaining = dn.remaining_axes(ndim, contracting, batch)
        return OperandAxes(contracting, batch, remaining)

    def ndim(self, side: Side) -> int:
        return self.lhs_ndim if side == "lhs" else self.rhs_ndim

    def gradient(self, side: Side) -> "DotGeneral":
        ranks = self.lhs_ndim, self.rhs_ndim
        dims, order = dn.for_gradient(side, self.dims, *ranks, self.order)
        (lhs_ca, _), (batch, _) = self.dims
        out_ndim = self.lhs_rank + self.rhs_ndim - len(lhs_ca) - len(batch)
        other_ndim = self.rhs_ndim if side == "lhs" else self.lhs_ndim
        return DotGeneral(dims, out_ndim, other_ndim, order)

    def in_float(
        self,
        lhs: Any,
        rhs: Any,
        precision: Any,
        preferred_element_type: Any,
        out_sharding: Any,
    ) -> jax.Array:
        sharding = {} if out_sharding is None else {"out_sharding": out_sharding}
        return lax.dot_general(
            lhs, rhs, self.dims, precision, preferred_element_type, **sharding
        )

    def in_storage(self, side: Side, stored_axes: dn.Axes) -> "DotGeneral | None":
        kept = [stored_axes[axis] for axis in self.axes(side).remaining]
        if kept != sorted(kept):
            return None  # The axes of the result would be in another order.

        def stored(lhs_axes: dn.Axes, rhs_axes: dn.Axes) -> tuple[dn.Axes, dn.Axes]:
            if side == "lhs":
                return tuple(stored_axes[axis] for axis in lhs_axes), rhs_axes
            return lhs_axes, tuple(stored_axes[axis] for axis in rhs_axes)

        contracting, batch = self.dims
        return dataclasses.replace(self, dims=(stored(*contracting), stored(*batch)))

    def rhs_scale_to_lhs(self, scale: jax.Array) -> jax.Array:
        return dn.rhs_scale_to_lhs(scale, self.dims, self.lhs_ndim)

    def lhs_scale_to_rhs(self, scale: jax.Array) -> jax.Array:
        return dn.rhs_scale_to_lhs(scale, dn.transpose(self.dims), self.rhs_ndim)

    def tiled(self, counts: tuple[int, ...]) -> "DotGeneral":
        front = sum(count > 1 for count in counts)
        contracting, (lhs_ba, rhs_ba) = dn.behind_new_axes(self.dims, front, front)
        tiles = tuple(range(front))
        dims = contracting, ((*tiles, *lhs_ba), (*tiles, *rhs_ba))
        order = self.order
        if order is not None:
            order = (*tiles, *(axis + front for axis in order))
        return DotGeneral(dims, self.lhs_ndim + front, self.rhs_ndim + front, order)

    def contract(self, kind, lhs, rhs, out_sharding=None):
        sharded = dataclasses.replace(self, out_sharding=out_sharding)
        return super(DotGeneral, sharded).contract(kind, lhs, rhs)
