"""The sums of products of a contraction: one dot, or scaled dots summed over tiles."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from aqtlite import lowering, numerics
from aqtlite.config.arithmetic import Form
from aqtlite.contraction.execution import ContractionExecution
from aqtlite.lowering import Dot, exact, gpu, int4_products, narrow
from aqtlite.lowering.target import TargetDependent
from aqtlite.operations import SIDES, DotInput, Operation, Side
from aqtlite.qtensor.qtensor import Operand, QTensor
from aqtlite.shapes import block_shapes
from aqtlite.shapes.sharding import sharded_like


def sum_products(
    how: ContractionExecution,
    operation: Operation,
    lhs: Operand,
    rhs: Operand,
    lhs_q: QTensor | None,
    rhs_q: QTensor | None,
) -> jax.Array:
    """Contracts two operands, without the scales that multiply the output.

    Args:
        how: execution of the contraction.
        operation: the contraction.
        lhs: left operand.
        rhs: right operand.
        lhs_q: lhs quantized, None if it stays in floating point.
        rhs_q: rhs quantized, None if it stays in floating point.

    Returns:
        The unscaled sums, of integers where operands are contracted as integers; scaled
        sums, in float32, if scales vary along contracting axes (`tile_counts`).
    """
    left = _dot_input(how, operation, "lhs", lhs, lhs_q)
    right = _dot_input(how, operation, "rhs", rhs, rhs_q)
    if how.kind == "narrow" and how.path == "fwd":
        left, right = _as_if_given(left, right)
    counts = tile_counts(how, operation, lhs_q, rhs_q) if how.has_blocks else ()
    if math.prod(counts) == 1:
        return dot(how, operation, left, right)
    return _sum_of_tiles(how, operation, counts, (left, lhs_q), (right, rhs_q))


def scaled(
    how: ContractionExecution,
    operation: Operation,
    sums: jax.Array,
    lhs_q: QTensor | None,
    rhs_q: QTensor | None,
) -> jax.Array:
    """Applies the scales of the operands to what `sum_products` returned.

    Returns:
        float32; the sums unchanged if no scale multiplies them, or if they were scaled
        tile by tile.
    """
    if how.has_blocks and math.prod(tile_counts(how, operation, lhs_q, rhs_q)) > 1:
        return sums
    scales: list[jax.Array] = []
    pairs = (how.lhs, lhs_q), (how.rhs, rhs_q)
    for side, (one, q) in zip(SIDES, pairs, strict=True):
        # A scale that moved to lhs was replaced by ones.
        has_moved = bool(scales) and one.reuse == "stored"
        if q is not None and one.scales_output and not has_moved:
            scale = of_elements(operation, side, q.scale, q.qvalue.shape)
            scales.append(operation.scale_to_output(side, scale))
    return _multiplied(sums, scales, how.out_sharding)


def _multiplied(
    sums: jax.Array, scales: list[jax.Array], sharding: NamedSharding | None
) -> jax.Array:
    """Multiplies sums by the scales of lhs and rhs.

    The scale of rhs, usually the weights, goes first: integers times the scale of a
    large lhs could overflow where the result does not.
    """
    if not scales:
        return sums
    *first, last = reversed(scales)
    if sharding is not None:
        *first, last = (sharded_like(one, sharding) for one in (*first, last))
    out = functools.reduce(lax.mul, first, sums.astype(jnp.float32))
    return exact.rounded_product(out, last)


def _dot_input(
    how: ContractionExecution,
    operation: Operation,
    side: Side,
    x: Operand,
    q: QTensor | None,
) -> DotInput:
    """Returns one operand in the form in which it enters the dot.

    Args:
        how: execution of the contraction.
        operation: the contraction.
        side: side of the operand.
        x: the operand.
        q: the operand quantized, None if it stays in floating point.
    """
    form = (how.lhs if side == "lhs" else how.rhs).form
    if q is not None and form == "stored":
        return _stored(operation, side, q)
    if q is not None and form == "narrow":
        return _narrow(q)
    values = jnp.asarray(x) if q is None else _floats(q, form)
    if how.is_product and values.dtype != np.float64:
        # Rounded to its dtype, whatever computes it in the same loop.
        values = exact.float32(values)
    values = values if how.in_dtype is None else values.astype(how.in_dtype)
    return DotInput(values)


def _stored(operation: Operation, side: Side, q: QTensor) -> DotInput:
    """The dot input of stored integers: signed values and their zero point."""
    values, zero_point, grid = q.qvalue, q.zero_point, q.numerics
    if values.dtype == jnp.uint8:
        # Flipping the sign bit subtracts 128, from the zero point as well.
        values = lax.bitcast_convert_type(values ^ np.uint8(128), jnp.int8)
        before = (
            jnp.zeros_like(q.scale, jnp.int32) if zero_point is None else zero_point
        )
        zero_point = before - 128
    elif jnp.issubdtype(values.dtype, jnp.unsignedinteger):
        values = values.astype(jnp.int8 if values.dtype == jnp.uint4 else jnp.int32)
    if zero_point is not None:
        # Blocks along kept axes share a zero point, and so do groups.
        axes = operation.axes(side)
        zero_point = of_elements(operation, side, zero_point, values.shape)
        if axes.groups > 1:
            zero_point = block_shapes.repeat(zero_point, values.shape, axes.cuttable)
    largest = int(jnp.iinfo(values.dtype).max) if grid is None else grid.largest_stored
    return DotInput(values, zero_point, largest, sums=q.sums)


def _narrow(q: QTensor) -> DotInput:
    """The dot input of stored floats of 8 bits."""
    grid = q.numerics
    if not isinstance(grid, numerics.Float):
        return DotInput(q.qvalue)
    largest = grid.bound / grid.smallest
    return DotInput(q.qvalue, None, int(largest), grid.smallest)


def _as_if_given(lhs: DotInput, rhs: DotInput) -> tuple[DotInput, DotInput]:
    """Makes XLA contract operands alike, whether they are computed or given.

    Operands that a CPU contracts as integers need no barrier.
    """
    units, largest = (lhs.unit, rhs.unit), (lhs.largest, rhs.largest)
    if narrow.units_of_integers(units, largest) is not None:
        return lhs, rhs
    left, right = (
        one._replace(values=exact.fusion_barrier(one.values)) for one in (lhs, rhs)
    )
    return left, right


def _floats(q: QTensor, form: Form) -> jax.Array:
    """The float values of a quantized operand that is contracted in floating point."""
    if form == "decoded":
        q = dataclasses.replace(q, scale=jnp.ones((1,) * q.qvalue.ndim, jnp.float32))
    # Contracted alike, whether the operand was given or quantized here.
    wide = dataclasses.replace(q, dtype=exact.wide_dtype(q.dtype))
    return exact.fusion_barrier(wide.dequant())


def dot(
    how: ContractionExecution, operation: Operation, left: DotInput, right: DotInput
) -> jax.Array:
    """Contracts two inputs by the kind of dot that the execution has, unscaled."""
    kind: lowering.Kind = lowering.Floats(how.precision, how.accumulator)
    if how.kind == "integers":
        kind = lowering.Integers(how.accumulator)
    elif how.kind == "integers in float" and how.in_dtype is not None:
        kind = lowering.IntegersInFloat(how.in_dtype, how.accumulator)
    elif how.kind == "mixed":
        kind = lowering.Mixed(how.out_dtype, how.precision, how.accumulator)
    elif how.kind == "narrow":
        kind = lowering.Narrow(how.accumulator)
    sums = operation.contract(kind, left, right, how.out_sharding)
    return sums if how.accumulator is None else sums.astype(how.accumulator)


def tile_counts(
    how: ContractionExecution,
    operation: Operation,
    lhs_q: QTensor | None,
    rhs_q: QTensor | None,
) -> tuple[int, ...]:
    """The number of tiles per contracting axis, in which scales are constant."""
    pairs = (how.lhs, lhs_q), (how.rhs, rhs_q)
    counts = [
        operation.axes(side).counts_in_group(q.scale.shape)
        for side, (one, q) in zip(SIDES, pairs, strict=True)
        if q is not None and one.scales_output
    ]
    return tuple(math.lcm(*of_axis) for of_axis in zip(*counts, strict=True))


def _sum_of_tiles(
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
    given: list[jax.Array | None] = []
    pairs = (how.lhs, *lhs), (how.rhs, *rhs)
    for side, (one, x, q) in zip(SIDES, pairs, strict=True):
        scale = None
        if q is not None and one.scales_output:
            scale = of_elements(operation, side, q.scale, x.values.shape)
        given += [x.values, x.zero_point, scale]
    leaves, structure = jax.tree.flatten((operation, given))
    largest = lhs[0].largest, rhs[0].largest
    return _SumOfTiles(how, structure, counts, largest)(*leaves)


def of_elements(
    operation: Operation, side: Side, x: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    """Repeats scales or zero points that blocks along kept axes, or groups, share."""
    axes = operation.axes(side)
    for axis in axes.batch + axes.remaining:
        if x.shape[axis] not in (1, shape[axis]):
            x = block_shapes.repeat(x, shape, (axis,))
    if axes.groups > 1:
        for axis in axes.cuttable:
            x = block_shapes.repeat_into(x, axis, axes.groups)
    return x


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
    scale of each operand."""

    counts: tuple[int, ...]
    """Number of tiles of each contracting axis."""

    largest: tuple[int | None, int | None]
    """Largest magnitude of the stored integers of lhs and rhs."""

    def reference(self, *leaves):
        operation, given = self._cut(*leaves)
        front = sum(count > 1 for count in self.counts)
        sharding = self.how.out_sharding
        if sharding is not None:
            sharding = sharding.update(spec=(*(None,) * front, *sharding.spec))
        how = dataclasses.replace(self.how, out_sharding=sharding)
        dots = self._scaled_dot(how, operation.tiled(self.counts), given)
        return jnp.sum(dots, axis=tuple(range(front)))

    def lowered(self, target, *leaves):
        if target.partitions > 1 or self.how.out_sharding is not None:
            return self.reference(*leaves)
        uncut = jax.tree.unflatten(self.structure, leaves)
        if int4_products.is_available(target) and self._suits_kernel(*uncut):
            return self._by_kernel(*uncut)
        if target.is_gpu:
            leaves = tuple(
                gpu.widened(x, target) if x.dtype == jnp.int4 else x for x in leaves
            )
        operation, given = self._cut(*leaves)
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

    def _cut(self, *leaves):
        """The operation, and the operands cut into tiles; scales laid out like sums."""
        operation, given = jax.tree.unflatten(self.structure, leaves)
        tiled, pieces = operation.tiled(self.counts), []
        for side, one in zip(SIDES, (given[:3], given[3:]), strict=True):
            axes = operation.axes(side)
            values, zero_point, scale = (
                x
                if x is None
                else block_shapes.cut(x, axes.cuttable, self.counts, axes.groups)
                for x in one
            )
            scale = None if scale is None else tiled.scale_to_output(side, scale)
            pieces += [values, zero_point, scale]
        return operation, pieces

    def _suits_kernel(self, operation, given):
        lhs, lhs_zero, lhs_scale, rhs, rhs_zero, rhs_scale = given
        kind, accumulator = self.how.kind, self.how.accumulator
        is_kind = kind in ("integers", "integers in float", "mixed")
        if not is_kind or accumulator is not None or not isinstance(operation, Dot):
            return False
        is_lhs = lhs.dtype in (jnp.int4, jnp.int8) or (
            kind == "mixed" and lhs.dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
        )
        has_zero = lhs_zero is not None or rhs_zero is not None
        if has_zero or rhs_scale is None or not is_lhs:
            return False
        has_tiles = rhs_scale.shape[-1:] == self.counts and (
            lhs_scale is None or lhs_scale.shape[-1] in (1, *self.counts)
        )
        is_whole = (
            has_tiles and rhs.shape[-1] % (int4_products.BLOCK * self.counts[-1]) == 0
        )
        return is_whole and int4_products.takes(lhs, rhs, operation.dims)

    def _by_kernel(self, operation, given):
        lhs, _, lhs_scale, rhs, _, rhs_scale = given
        (tiles,) = self.counts
        *lhs_rest, products = lhs.shape
        *rhs_rest, _ = rhs.shape
        x, weights = lhs.reshape(-1, products), rhs.reshape(-1, products)
        rows = x.shape[0]
        scales = jnp.broadcast_to(rhs_scale, (*rhs_rest, tiles)).reshape(-1, tiles)
        if jnp.issubdtype(x.dtype, jnp.floating):
            x, factors = int4_products.digits_of_tiles(x, tiles, self.how.out_dtype)
        elif lhs_scale is None:
            factors = jnp.ones((rows, tiles), jnp.float32)
        else:
            factors = jnp.broadcast_to(lhs_scale, (*lhs_rest, tiles))
            factors = factors.reshape(rows, tiles)
        out = int4_products.scaled_sums(x.astype(jnp.int8), weights, factors, scales)
        out = out.reshape(*lhs_rest, *rhs_rest)
        return out if operation.order is None else out.transpose(operation.order)

    def _scaled_dot(self, how, operation, given):
        lhs, lhs_zero, lhs_scale, rhs, rhs_zero, rhs_scale = given
        left = DotInput(lhs, lhs_zero, self.largest[0])
        right = DotInput(rhs, rhs_zero, self.largest[1])
        scales = [scale for scale in (lhs_scale, rhs_scale) if scale is not None]
        sums = dot(how, operation, left, right)
        return _multiplied(sums, scales, how.out_sharding)
