"""The sums of products of a contraction: one dot, or scaled dots summed over tiles.

Before: `quantization/quantizer.py`, which made integers and scales.
Next: `lowering/kinds.py`, the form of a dot on a platform.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite import numerics
from aqtlite.config.arithmetic import Form
from aqtlite.contraction import dots, tiles
from aqtlite.contraction.execution import ContractionExecution
from aqtlite.lowering import exact, fusion
from aqtlite.lowering.forms import narrow
from aqtlite.operations import SIDES, DotInput, Operation, Side
from aqtlite.qtensor.qtensor import Operand, QTensor
from aqtlite.shapes import block_shapes


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
        sums, in float32, if scales vary along contracting axes (`tiles.counts`).
    """
    left = dot_input(how, operation, "lhs", lhs, lhs_q)
    right = dot_input(how, operation, "rhs", rhs, rhs_q)
    if how.kind == "narrow" and how.path == "fwd":
        left, right = _as_if_given(left, right)
    counts = tiles.counts(how, operation, lhs_q, rhs_q) if how.has_blocks else ()
    if math.prod(counts) == 1:
        return dots.dot(how, operation, left, right)
    return tiles.sum_products(how, operation, counts, (left, lhs_q), (right, rhs_q))


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
    if how.has_blocks and math.prod(tiles.counts(how, operation, lhs_q, rhs_q)) > 1:
        return sums
    scales: list[jax.Array] = []
    pairs = (how.lhs, lhs_q), (how.rhs, rhs_q)
    for side, (one, q) in zip(SIDES, pairs, strict=True):
        # A scale that moved to lhs was replaced by ones.
        has_moved = bool(scales) and one.reuse == "stored"
        if q is not None and one.scales_output and not has_moved:
            scale = dots.of_elements(operation, side, q.scale, q.qvalue.shape)
            scales.append(operation.scale_to_output(side, scale))
    return dots.multiplied(sums, scales)


def dot_input(
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
        zero_point = dots.of_elements(operation, side, zero_point, values.shape)
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
        one._replace(values=fusion.barrier(one.values)) for one in (lhs, rhs)
    )
    return left, right


def _floats(q: QTensor, form: Form) -> jax.Array:
    """The float values of a quantized operand that is contracted in floating point."""
    if form == "decoded":
        q = dataclasses.replace(q, scale=jnp.ones((1,) * q.qvalue.ndim, jnp.float32))
    # Contracted alike, whether the operand was given or quantized here.
    wide = dataclasses.replace(q, dtype=exact.wide_dtype(q.dtype))
    return fusion.barrier(wide.dequant())
