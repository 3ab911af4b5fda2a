"""The sums of products of floats with codes of four bits, by a kernel on CPUs.

The kernel looks codes up in registers, where other forms decode them to float32 in
memory. Sums are of floats, in an order that depends neither on the other rows nor on
the layout of the codes; where there is no kernel, they are rounded otherwise.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.contraction import accumulation, block_products, dots, tiles
from aqtlite.contraction.execution import ContractionExecution
from aqtlite.contraction.float_kernel import FloatKernel, is_of_matrices, may_take
from aqtlite.lowering import exact
from aqtlite.lowering.forms import panel_products, table_products
from aqtlite.numerics import Float, NormalFloat
from aqtlite.operations import Operation
from aqtlite.operations.dot_general import DotGeneral
from aqtlite.qtensor import stored_values
from aqtlite.qtensor.qtensor import Operand, QTensor
from aqtlite.qtensor.transposed_values import TransposedValues
from aqtlite.shapes.dimension_numbers import Axes
from aqtlite.shapes.sharding import explicit_sharding


def takes(
    how: ContractionExecution,
    operation: Operation,
    lhs: Operand,
    lhs_q: QTensor | None,
    rhs_q: QTensor,
) -> bool:
    """Returns True if `Sums` contracts two operands.

    Args:
        how: execution of the contraction.
        operation: the contraction.
        lhs: left operand.
        lhs_q: lhs quantized, None if it stays in floating point.
        rhs_q: rhs quantized.
    """
    are_floats = how.kind in ("float", "in blocks") and how.rhs.form != "float"
    if how.path != "fwd" or not (are_floats and may_take(how, operation)):
        return False
    if how.rhs.tensor.use_fake_quant or lhs.dtype not in tiles.FLOATS:
        return False
    if how.out_sharding is not None or explicit_sharding(rhs_q.scale) is not None:
        return False
    if not is_of_matrices(operation) or rhs_q.dtype == np.float64:
        return False
    lhs_ca, _ = operation.dims[0]
    rows = math.prod(lhs.shape[: lhs.ndim - len(lhs_ca)])
    is_last = lhs_ca == tuple(range(lhs.ndim - len(lhs_ca), lhs.ndim))
    is_padded = lhs_q is not None and lhs_q.padding is not None
    if not is_last or is_padded or not isinstance(rows, int):
        return False
    is_read = reads_rhs(operation, rhs_q) and panel_products.runs_here()
    return is_read and table_products.pays(rows)


def reads_rhs(operation: Operation, rhs: QTensor) -> bool:
    """Returns True if the kernel reads rhs, in its own order or as it is stored.

    Args:
        operation: the contraction.
        rhs: rhs quantized.
    """
    if not is_of_matrices(operation):
        return False
    contracting = operation.dims[0][1]
    first, rank = tuple(range(len(contracting))), rhs.ndim
    last = tuple(range(rank - len(contracting), rank))
    return contracting in (first, last) and reads(rhs, contracting)


def reads(weight: QTensor, contracting: Axes) -> bool:
    """Returns True if the kernel reads a weight of matrices.

    Args:
        weight: the weight quantized.
        contracting: its contracting axes.
    """
    grid = weight.numerics
    # Another table may decode a value by the others.
    has_table = isinstance(grid, Float | NormalFloat) and stored_values.has_codes(grid)
    if not has_table or weight.padding is not None:
        return False
    sizes = [weight.shape[axis] for axis in contracting]
    blocks = [weight.blocks[axis] for axis in contracting]
    are_cut = [block < size for block, size in zip(blocks, sizes, strict=True)]
    last = max(itertools.compress(itertools.count(), are_cut), default=0)
    # Tiles lie one behind another if those before the last axis have one element.
    is_whole = set(blocks[:last]) <= {1}
    columns = math.prod(weight.shape) // max(math.prod(sizes), 1)
    return is_whole and table_products.reads(columns, math.prod(blocks))


class Sums(FloatKernel):
    """The sums of products of floats with codes, looked up by the kernel."""

    def lowered(self, target, *leaves):
        if not panel_products.is_available(target):
            return self.reference(*leaves)
        operation, (lhs, _), (lhs_q, rhs_q) = self.operands(*leaves)
        how = block_products.as_floats(self.how)
        x = accumulation.dot_input(how, operation, "lhs", lhs, lhs_q).values
        (_, contracting), _ = operation.dims
        products = math.prod(rhs_q.shape[axis] for axis in contracting)
        scales = _scales(how, operation, rhs_q)
        rows = exact.float32(x).reshape(-1, products)
        out = _sums(rows, rhs_q, contracting, scales.reshape(-1, *scales.shape[-1:]))
        rest = x.shape[: x.ndim - len(contracting)]
        return operation.ordered(out.reshape(*rest, *scales.shape[:-1]))


def _scales(
    how: ContractionExecution, operation: DotGeneral, rhs_q: QTensor
) -> jax.Array:
    """The scales of the tiles of each column; ones where they multiply the sums.

    Returns:
        float32, ``(*columns, tiles)``.
    """
    scale = jnp.ones((1,) * rhs_q.ndim, jnp.float32)
    if how.rhs.form == "dequantized":
        scale = dots.of_elements(operation, "rhs", rhs_q.scale, rhs_q.shape)
    contracting, _, remaining, *_ = operation.axes("rhs")
    scale = scale.transpose(*remaining, *contracting)
    tiles_of_axes = scale.shape[len(remaining) :]
    columns = [rhs_q.shape[axis] for axis in remaining]
    every = jnp.broadcast_to(scale, (*columns, *tiles_of_axes))
    return every.reshape(*columns, math.prod(tiles_of_axes))


def _sums(
    x: jax.Array, rhs_q: QTensor, contracting: Axes, scales: jax.Array
) -> jax.Array:
    """The sums of rows with the columns of codes."""
    grid, axes = rhs_q.numerics, tuple(range(rhs_q.ndim))
    if grid is None:
        raise TypeError(f"{rhs_q!r} has no codes")
    codes = rhs_q.qvalue
    if isinstance(codes, TransposedValues):
        axes, codes = codes.axes, codes.values
    is_first = axes[contracting[0]] == 0
    is_given = codes.dtype == jnp.int4
    if not is_given:
        codes = stored_values.to_save(codes, grid)
    codes = codes.reshape((x.shape[1], -1) if is_first else (-1, x.shape[1]))
    # XLA:CPU writes codes of four bits one by one. Bytes have two of one row.
    if not is_given or codes.shape[1] % 2:
        codes = lax.bitcast_convert_type(codes.astype(jnp.int8), jnp.uint8)
    table = stored_values.floats_of_codes(grid)
    if is_first:
        return table_products.sums_of_columns(x, codes, scales.T, table)
    return table_products.sums(x, codes, scales, table)
