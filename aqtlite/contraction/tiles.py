"""The sum of scaled dots over tiles, in each of which scales are constant."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite.contraction import dots
from aqtlite.contraction.execution import ContractionExecution, OperandExecution
from aqtlite.lowering import gpu
from aqtlite.lowering.target import TargetDependent
from aqtlite.operations import SIDES, DotInput, Operation, Side
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.shapes import block_shapes


def counts(
    how: ContractionExecution,
    operation: Operation,
    lhs_q: QTensor | None,
    rhs_q: QTensor | None,
) -> tuple[int, ...]:
    """The number of tiles per contracting axis, in which scales are constant."""
    pairs = (how.lhs, lhs_q), (how.rhs, rhs_q)
    found = [
        operation.axes(side).counts_in_group(q.scale.shape)
        for side, (one, q) in zip(SIDES, pairs, strict=True)
        if q is not None and one.scales_output
    ]
    return tuple(math.lcm(*of_axis) for of_axis in zip(*found, strict=True))


def sum_products(
    how: ContractionExecution,
    operation: Operation,
    counts: tuple[int, ...],
    lhs: tuple[DotInput, QTensor | None],
    rhs: tuple[DotInput, QTensor | None],
) -> jax.Array:
    """Contracts tile by tile, scales each dot and sums over the tiles.

    Args:
        how: execution of the contraction.
        operation: the contraction.
        counts: number of tiles of each contracting axis.
        lhs: input to the dot, and the quantized operand if there is one.
        rhs: like `lhs`.

    Returns:
        float32.
    """
    left, lhs_scale = _cut(operation, "lhs", how.lhs, counts, *lhs)
    right, rhs_scale = _cut(operation, "rhs", how.rhs, counts, *rhs)
    given = [left.values, left.zero_point, lhs_scale]
    given += [right.values, right.zero_point, rhs_scale]
    leaves, structure = jax.tree.flatten((operation, given))
    largest = left.largest, right.largest
    return _SumOfTiles(how, structure, counts, largest)(*leaves)


def _cut(
    operation: Operation,
    side: Side,
    one: OperandExecution,
    counts: tuple[int, ...],
    given: DotInput,
    q: QTensor | None,
) -> tuple[DotInput, jax.Array | None]:
    """Cuts one input to the dot into tiles, and its scale, laid out like the sums."""
    axes = operation.axes(side)

    def cut(x: jax.Array) -> jax.Array:
        return block_shapes.cut(x, axes.cuttable, counts, axes.groups)

    zero_point = None if given.zero_point is None else cut(given.zero_point)
    values = cut(given.values)
    pieces = given._replace(values=values, zero_point=zero_point, sums=None)
    if q is None or not one.scales_output:
        return pieces, None
    scale = cut(dots.of_elements(operation, side, q.scale, given.values.shape))
    return pieces, operation.tiled(counts).scale_to_output(side, scale)


@dataclasses.dataclass(frozen=True)
class _SumOfTiles(TargetDependent):
    """The sum of scaled dots over tiles.

    A loop where one device holds whole arrays: the sums of all tiles at once would
    multiply the memory by the number of tiles, and CPUs have no fast batched dot.
    """

    is_composite = True

    how: ContractionExecution
    structure: Any
    """Pytree structure of the arguments: the operation, then the values, zero point and
    scale of each operand, cut into tiles."""

    counts: tuple[int, ...]
    """Number of tiles of each contracting axis."""

    largest: tuple[int | None, int | None]
    """Largest magnitude of the stored integers of lhs and rhs."""

    def reference(self, *leaves):
        operation, given = jax.tree.unflatten(self.structure, leaves)
        front = sum(count > 1 for count in self.counts)
        sharding = self.how.out_sharding
        if sharding is not None:
            sharding = sharding.update(spec=(*(None,) * front, *sharding.spec))
        how = dataclasses.replace(self.how, out_sharding=sharding)
        sums = self._scaled_dot(how, operation.tiled(self.counts), given)
        return jnp.sum(sums, axis=tuple(range(front)))

    def lowered(self, target, *leaves):
        if target.partitions > 1 or self.how.out_sharding is not None:
            return self.reference(*leaves)
        if target.is_gpu:
            leaves = tuple(
                gpu.widened(x, target) if x.dtype == jnp.int4 else x for x in leaves
            )
        operation, given = jax.tree.unflatten(self.structure, leaves)
        shape = tuple(count for count in self.counts if count > 1)

        def in_line(x):
            rest = x.shape[len(shape) :]
            return jnp.broadcast_to(x, shape + rest).reshape(math.prod(shape), *rest)

        def add(total, one):
            return total + self._scaled_dot(self.how, *one), None

        pieces = operation.of_tiles(self.counts), jax.tree.map(in_line, given)
        first, others = (
            jax.tree.map(lambda x, part=part: x[part], pieces)
            for part in (0, slice(1, None))
        )
        start = self._scaled_dot(self.how, *first)
        return lax.scan(add, start, others)[0]

    def _scaled_dot(self, how, operation, given):
        lhs, lhs_zero, lhs_scale, rhs, rhs_zero, rhs_scale = given
        left = DotInput(lhs, lhs_zero, self.largest[0])
        right = DotInput(rhs, rhs_zero, self.largest[1])
        scales = [scale for scale in (lhs_scale, rhs_scale) if scale is not None]
        sums = dots.dot(how, operation, left, right)
        return dots.multiplied(sums, scales, how.out_sharding)
