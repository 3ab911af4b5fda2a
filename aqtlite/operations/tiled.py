"""The contractions of tiles as one operation."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from aqtlite.operations.base import DotInput, OperandAxes, Operation, Side


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["one"], meta_fields=["count"]
)
@dataclasses.dataclass(frozen=True)
class Tiled(Operation):
    """A batch of contractions, along a leading axis of both operands and the result."""

    one: Operation
    """One of them. Its own arrays, if it has any, have the leading axis, too."""

    count: int
    """How many there are."""

    @property
    def name(self) -> str:
        return f"{self.one.name}_in_tiles"

    def output_shape(
        self, lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...]
    ) -> tuple[int, ...]:
        return self.count, *self.one.output_shape(lhs_shape[1:], rhs_shape[1:])

    def axes(self, side: Side) -> OperandAxes:
        *axes, groups = self.one.axes(side)
        contracting, batch, *others = (tuple(a + 1 for a in one) for one in axes)
        return OperandAxes(contracting, (0, *batch), *others, groups)

    def ndim(self, side: Side) -> int:
        return self.one.ndim(side) + 1

    def gradient(self, side: Side) -> "Tiled":
        return Tiled(self.one.gradient(side), self.count)

    def scale_to_output(self, side: Side, scale: jax.Array) -> jax.Array:
        return self._of_each(lambda one, x: one.scale_to_output(side, x), scale)

    def rhs_scale_to_lhs(self, scale: jax.Array) -> jax.Array:
        return self._of_each(lambda one, x: one.rhs_scale_to_lhs(x), scale)

    def integer_dot(
        self, lhs: DotInput, rhs: DotInput, out_sharding: NamedSharding | None
    ) -> jax.Array:
        sharding = _of_one(out_sharding)
        return self._dots(lambda one, *pair: one.integer_dot(*pair, sharding), lhs, rhs)

    def integer_dot_in_float(
        self,
        lhs: DotInput,
        rhs: DotInput,
        in_dtype: np.dtype,
        out_sharding: NamedSharding | None,
    ) -> jax.Array:
        rest = in_dtype, _of_one(out_sharding)
        return self._dots(
            lambda one, *pair: one.integer_dot_in_float(*pair, *rest), lhs, rhs
        )

    def mixed_dot(
        self,
        lhs: DotInput,
        rhs: DotInput,
        out_dtype: np.dtype,
        out_sharding: NamedSharding | None,
    ) -> jax.Array:
        rest = out_dtype, _of_one(out_sharding)
        return self._dots(lambda one, *pair: one.mixed_dot(*pair, *rest), lhs, rhs)

    def narrow_dot(
        self, lhs: DotInput, rhs: DotInput, out_sharding: NamedSharding | None
    ) -> jax.Array:
        sharding = _of_one(out_sharding)
        return self._dots(lambda one, *pair: one.narrow_dot(*pair, sharding), lhs, rhs)

    def float_dot(
        self, lhs: DotInput, rhs: DotInput, out_sharding: NamedSharding | None
    ) -> jax.Array:
        sharding = _of_one(out_sharding)
        return self._dots(lambda one, *pair: one.float_dot(*pair, sharding), lhs, rhs)

    def _dots(
        self, dot: Callable[..., jax.Array], lhs: DotInput, rhs: DotInput
    ) -> jax.Array:
        def of_one(one: Operation, arrays: Any) -> jax.Array:
            left, right = (
                given._replace(values=values, zero_point=zero_point, sums=None)
                for given, (values, zero_point) in zip((lhs, rhs), arrays, strict=True)
            )
            return dot(one, left, right)

        arrays = [(given.values, given.zero_point) for given in (lhs, rhs)]
        return self._of_each(of_one, arrays)

    def _of_each(self, function: Callable[..., jax.Array], arrays: Any) -> jax.Array:
        """Maps a function of a contraction and of what belongs to it.

        Args:
            function: the function.
            arrays: a tree, each with the leading axis, or size 1 there.
        """

        def stacked(x: jax.Array) -> jax.Array:
            return jnp.broadcast_to(x, (self.count, *x.shape[1:]))

        return jax.vmap(function)(self.one, jax.tree.map(stacked, arrays))


def _of_one(out_sharding: NamedSharding | None) -> NamedSharding | None:
    """The sharding of the result of one contraction."""
    if out_sharding is None:
        return None
    return out_sharding.update(spec=tuple(out_sharding.spec)[1:])
