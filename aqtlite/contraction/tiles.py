"""The sum of scaled dots over tiles, in each of which scales are constant."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite.contraction import dots
from aqtlite.contraction.execution import ContractionExecution
from aqtlite.lowering.forms import cpu, gpu, panel_products, scaled_panel_products
from aqtlite.lowering.forms.weight_coding import Coding
from aqtlite.lowering.target import TargetDependent
from aqtlite.operations import SIDES, DotInput, Operation, Side
from aqtlite.operations.dot_general import DotGeneral
from aqtlite.qtensor.packed_values import PackedValues
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.shapes import block_shapes

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
_INTEGERS = (jnp.int4, jnp.int8)

# From this number of rows on, the kernel takes less time than XLA's loop although
# operands have to be transposed.
_ROWS_TO_TRANSPOSE = 64


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
    given = given_of(how, operation, lhs, rhs)
    leaves, structure = jax.tree.flatten((operation, given))
    largest = lhs[0].largest, rhs[0].largest
    return _SumOfTiles(how, structure, counts, largest)(*leaves)


def given_of(
    how: ContractionExecution,
    operation: Operation,
    lhs: tuple[DotInput, QTensor | None],
    rhs: tuple[DotInput, QTensor | None],
) -> list[Any]:
    """Returns the values, the zero point and the scale of each operand.

    Args:
        how: execution of the contraction.
        operation: the contraction.
        lhs: as in `sum_products`.
        rhs: as in `sum_products`.
    """
    given: list[Any] = []
    pairs = (how.lhs, *lhs), (how.rhs, *rhs)
    for side, (one, x, q) in zip(SIDES, pairs, strict=True):
        scale = None
        if q is not None and one.scales_output:
            scale = dots.of_elements(operation, side, q.scale, x.values.shape)
        given += [x.values, x.zero_point, scale]
    return given


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
        sums = self._scaled_dot(how, operation.tiled(self.counts), given)
        return jnp.sum(sums, axis=tuple(range(front)))

    def lowered(self, target, *leaves):
        if target.partitions > 1 or self.how.out_sharding is not None:
            return self.reference(*leaves)
        uncut = jax.tree.unflatten(self.structure, leaves)
        if panel_products.is_available(target):
            out = by_kernel(self.how, self.counts, *uncut)
            if out is not None:
                return out
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

    def _scaled_dot(self, how, operation, given):
        lhs, lhs_zero, lhs_scale, rhs, rhs_zero, rhs_scale = given
        left = DotInput(lhs, lhs_zero, self.largest[0])
        right = DotInput(rhs, rhs_zero, self.largest[1])
        scales = [scale for scale in (lhs_scale, rhs_scale) if scale is not None]
        sums = dots.dot(how, operation, left, right)
        return dots.multiplied(sums, scales)


def by_kernel(
    how: ContractionExecution,
    counts: tuple[int, ...],
    operation: Operation,
    given: Sequence[Any],
    coding: Coding = Coding.INTEGERS,
) -> jax.Array | None:
    """Contracts by the kernel that has a loop over tiles; None if it does not suit.

    Only for targets where `panel_products.is_available`.

    Args:
        how: execution of the contraction.
        counts: number of tiles of each contracting axis.
        operation: the contraction.
        given: result of `given_of`; the values of rhs may be `PackedValues`.
        coding: what the bits of rhs mean.
    """
    lhs, lhs_zero, lhs_scale, rhs, rhs_zero, rhs_scale = given
    is_kind = how.kind in ("integers", "integers in float", "mixed")
    if not isinstance(operation, DotGeneral):
        return None
    if not is_kind or how.accumulator is not None:
        return None
    is_float = how.kind == "mixed" and lhs.dtype in FLOATS
    has_zero = lhs_zero is not None or rhs_zero is not None
    if has_zero or rhs_scale is None or not (is_float or lhs.dtype in _INTEGERS):
        return None
    rows = math.prod(lhs.shape[axis] for axis in operation.axes("lhs").remaining)
    if rows >= _ROWS_TO_TRANSPOSE:
        operation, lhs, lhs_scale = _transposed(operation, "lhs", lhs, lhs_scale)
        if coding is Coding.INTEGERS:
            operation, rhs, rhs_scale = _transposed(operation, "rhs", rhs, rhs_scale)
    rank = len(counts)
    last = tuple(tuple(range(x.ndim - rank, x.ndim)) for x in (lhs, rhs))
    has_tiles = rhs_scale.shape[-rank:] == counts and (
        lhs_scale is None
        or all(
            own in (1, count)
            for own, count in zip(lhs_scale.shape[-rank:], counts, strict=True)
        )
    )
    if operation.dims != (last, ((), ())) or not has_tiles:
        return None
    lhs_rest, rhs_rest = lhs.shape[:-rank], rhs.shape[:-rank]
    if rhs.dtype not in _INTEGERS or 0 in lhs.shape:
        return None
    columns, size = math.prod(rhs_rest), math.prod(_sizes(rhs.shape, counts))
    if not panel_products.reads(columns, size, jnp.iinfo(rhs.dtype).bits):
        return None
    weights = _weights_in_rows(rhs, counts)
    if weights is None:
        return None
    x = _in_rows(lhs if is_float else lhs.astype(jnp.int8), counts)
    scales = _of_tiles(rhs_scale, rhs_rest, counts)
    if is_float:
        out = scaled_panel_products.of_floats(
            x, weights, scales, how.out_dtype, coding=coding
        )
    else:
        factors = jnp.float32(1) if lhs_scale is None else lhs_scale
        factors = _of_tiles(factors, lhs_rest, counts)
        out = scaled_panel_products.of_integers(
            x, weights, factors, scales, coding=coding
        )
    return operation.ordered(out.reshape(*lhs_rest, *rhs_rest))


def _transposed(
    operation: DotGeneral, side: Side, values: Any, scale: Any
) -> tuple[DotGeneral, Any, Any]:
    """Moves contracting axes of integers that are first behind the others."""
    contracting, batch, remaining, *_ = operation.axes(side)
    order = remaining + contracting
    is_first = contracting == tuple(range(len(contracting)))
    is_array = values.dtype in _INTEGERS and not isinstance(values, PackedValues)
    if batch or not (remaining and is_first and is_array):
        return operation, values, scale
    moved = operation.in_storage(side, tuple(map(order.index, range(len(order)))))
    if moved is None:
        return operation, values, scale
    products = math.prod(values.shape[axis] for axis in contracting)
    matrix = values.astype(jnp.int8).reshape(products, -1)
    shape = [values.shape[axis] for axis in order]
    values = cpu.transposed_matrix(matrix)[:, :products].reshape(shape)
    return moved, values, None if scale is None else scale.transpose(order)


def _weights_in_rows(weights: Any, counts: tuple[int, ...]) -> Any:
    """The weights in rows, as `scaled_panel_products` takes them; None if they are
    packed in another order."""
    *others, size = _sizes(weights.shape, counts)
    has_own_order = set(others) <= {1}
    if isinstance(weights, PackedValues):
        return weights.matrix if has_own_order else None
    if weights.dtype != jnp.int4 or has_own_order or size % 2:
        return _in_rows(weights, counts)
    # XLA:CPU moves int4 one by one.
    pairs = weights.reshape(*weights.shape[:-1], -1, 2)
    return _in_rows(lax.bitcast_convert_type(pairs, jnp.uint8), counts)


def _in_rows(values: jax.Array, counts: tuple[int, ...]) -> jax.Array:
    """The tiles of each row one behind another, as a matrix.

    Args:
        values: an array that is contracted along its last axes.
        counts: number of tiles along each of these.
    """
    rank, sizes = len(counts), _sizes(values.shape, counts)
    both = (n for pair in zip(counts, sizes, strict=True) for n in pair)
    cut = values.reshape(math.prod(values.shape[:-rank]), *both)
    order = (0, *range(1, 2 * rank, 2), *range(2, 2 * rank + 1, 2))
    return cut.transpose(order).reshape(len(cut), -1)


def _sizes(shape: tuple[int, ...], counts: tuple[int, ...]) -> list[int]:
    """The sizes of a tile along the contracting axes, which come last."""
    axes = zip(shape[-len(counts) :], counts, strict=True)
    return [size // count for size, count in axes]


def _of_tiles(
    scale: jax.Array, rest: tuple[int, ...], counts: tuple[int, ...]
) -> jax.Array:
    """The scales of the tiles of each row, as a matrix."""
    every = jnp.broadcast_to(scale, (*rest, *counts))
    return every.reshape(-1, math.prod(counts))
