"""A batch of contractions, one for each tile, as one operation."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from aqtlite.operations.base import OperandAxes, Operation, Side
from aqtlite.shapes.dimension_numbers import Axes
from aqtlite.shapes.sharding import explicit_sharding


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["one"], meta_fields=["count"]
)
@dataclasses.dataclass(frozen=True)
class Tiled(Operation):
    """A batch of contractions, along a leading axis of both operands and the result."""

    one: Operation
    """Contraction of one tile. Its own arrays, if any, have the leading axis, too."""

    count: int
    """Number of tiles."""

    @property
    def name(self) -> str:
        return f"{self.one.name}_in_tiles"

    def output_shape(
        self, lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...]
    ) -> tuple[int, ...]:
        return self.count, *self.one.output_shape(lhs_shape[1:], rhs_shape[1:])

    def axes(self, side: Side) -> OperandAxes:
        axes = self.one.axes(side)

        def behind(axes: Axes) -> Axes:
            return tuple(axis + 1 for axis in axes)

        return OperandAxes(
            behind(axes.contracting),
            (0, *behind(axes.batch)),
            behind(axes.remaining),
            behind(axes.window),
            axes.groups,
        )

    def ndim(self, side: Side) -> int:
        return self.one.ndim(side) + 1

    def gradient(self, side: Side) -> "Tiled":
        return Tiled(self.one.gradient(side), self.count)

    def scale_to_output(self, side: Side, scale: jax.Array) -> jax.Array:
        return self._each(lambda one, x: one.scale_to_output(side, x), scale)

    def rhs_scale_to_lhs(self, scale: jax.Array) -> jax.Array:
        return self._each(lambda one, x: one.rhs_scale_to_lhs(x), scale)

    def contract(self, kind, lhs, rhs, out_sharding=None):
        pair = lhs, rhs

        def of_one(arrays: Any, one: Operation) -> jax.Array:
            inputs = (
                given._replace(values=values, zero_point=zero_point, sums=None)
                for given, (values, zero_point) in zip(pair, arrays, strict=True)
            )
            return one.contract(kind, *inputs)

        arrays = self._stacked([(given.values, given.zero_point) for given in pair])
        run = jax.vmap(of_one)
        if any(map(explicit_sharding, jax.tree.leaves(arrays))):
            # `jax.vmap` of a convolution merges axes, which JAX refuses for axes that
            # are sharded explicitly.
            if out_sharding is None:
                out = jax.eval_shape(
                    of_one, *jax.tree.map(_of_tile, (arrays, self.one))
                )
                out_sharding = _of_tiles(out.sharding)
            run = jax.sharding.auto_axes(run, out_sharding=out_sharding)
        return run(arrays, self.one)

    def _each(self, function: Callable[..., jax.Array], scale: jax.Array) -> jax.Array:
        """Maps a function of an operation and a scale over tiles."""
        return jax.vmap(function)(self.one, self._stacked(scale))

    def _stacked(self, arrays: Any) -> Any:
        """Repeats arrays that all tiles share along the leading axis."""
        return jax.tree.map(
            lambda x: jnp.broadcast_to(x, (self.count, *x.shape[1:])), arrays
        )


def _of_tile(x: jax.Array) -> jax.ShapeDtypeStruct:
    """The shape, dtype and sharding of one tile's part of an array."""
    sharding = jax.typeof(x).sharding
    spec = tuple(sharding.spec)[1:]
    return jax.ShapeDtypeStruct(
        x.shape[1:], x.dtype, sharding=sharding.update(spec=spec)
    )


def _of_tiles(sharding: NamedSharding) -> NamedSharding:
    """The sharding of the results of all tiles, from that of one result."""
    return sharding.update(spec=(None, *sharding.spec))
