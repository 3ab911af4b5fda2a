"""The sums of products of floats with codes of a table (nf4), by a kernel on CPUs.

The kernel looks codes up in registers, where other forms decode them to float32 in
memory. Sums are of floats, in an order that depends neither on the other rows nor on
the layout of the codes; where there is no kernel, they are rounded otherwise.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.contraction import accumulation, dots, tiles
from aqtlite.contraction.execution import ContractionExecution
from aqtlite.lowering import exact
from aqtlite.lowering.forms import panel_products, table_products
from aqtlite.lowering.target import TargetDependent
from aqtlite.numerics import Numerics
from aqtlite.operations import Operation
from aqtlite.operations.dot_general import DotGeneral
from aqtlite.qtensor.qtensor import Operand, QTensor
from aqtlite.shapes.dimension_numbers import Axes
from aqtlite.shapes.sharding import explicit_sharding

_CODES = 16


def takes(
    how: ContractionExecution, operation: Operation, lhs: Operand, rhs_q: QTensor
) -> bool:
    """Returns True if `sum_products` contracts two operands.

    Args:
        how: execution of the contraction.
        operation: the contraction.
        lhs: left operand.
        rhs_q: rhs quantized.
    """
    if how.path != "fwd" or how.lhs.form != "float" or not _is_decoded(how, rhs_q):
        return False
    if how.accumulator is not None or how.in_dtype is not None or how.is_product:
        return False
    if how.out_sharding is not None or explicit_sharding(rhs_q.scale) is not None:
        return False
    if not isinstance(operation, DotGeneral) or operation.dims[1] != ((), ()):
        return False
    (lhs_ca, rhs_ca), _ = operation.dims
    count = len(lhs_ca)
    first, last = tuple(range(count)), tuple(range(rhs_q.ndim - count, rhs_q.ndim))
    are_in_order = lhs_ca == tuple(range(lhs.ndim - count, lhs.ndim))
    if not are_in_order or rhs_ca not in (first, last) or lhs.dtype not in tiles.FLOATS:
        return False
    rows = math.prod(lhs.shape[: lhs.ndim - count])
    is_read = reads(rhs_q, rhs_ca) and panel_products.runs_here()
    return is_read and isinstance(rows, int) and table_products.pays(rows)


def reads(weight: QTensor, contracting: Axes) -> bool:
    """Returns True if the kernel reads a weight of matrices.

    Args:
        weight: the weight quantized.
        contracting: its contracting axes.
    """
    grid = weight.numerics
    if grid is None or grid.arithmetic != "table" or grid.storage_dtype != jnp.uint4:
        return False
    sizes = [weight.shape[axis] for axis in contracting]
    blocks = [weight.blocks[axis] for axis in contracting]
    are_cut = [block < size for block, size in zip(blocks, sizes, strict=True)]
    last = max(itertools.compress(itertools.count(), are_cut), default=0)
    # Tiles lie one behind another if those before the last axis have one element.
    is_whole = not weight.padding and set(blocks[:last]) <= {1}
    columns = math.prod(weight.shape) // max(math.prod(sizes), 1)
    return is_whole and table_products.reads(columns, math.prod(blocks))


def _is_decoded(how: ContractionExecution, q: QTensor) -> bool:
    """Whether an operand has codes, and is contracted as the floats they stand for."""
    is_form = how.rhs.form in ("decoded", "dequantized")
    has_codes = q.qvalue.dtype == jnp.uint4 and not how.rhs.tensor.use_fake_quant
    return is_form and has_codes and q.dtype != np.float64


def _scale(how: ContractionExecution, q: QTensor) -> Any:
    """The scale that multiplies products: of decoded operands, the sums' is left."""
    if how.rhs.form == "dequantized":
        return q.scale
    return jnp.ones((1,) * q.ndim, jnp.float32)


@functools.cache
def _table(grid: Numerics) -> table_products.Table:
    """The floats of the codes of a grid."""
    # Whatever mesh is traced for: an abstract one has no devices to compute on.
    no_mesh = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
    with jax.ensure_compile_time_eval(), no_mesh:
        values = grid.decode(jnp.arange(_CODES, dtype=jnp.uint4))
    return tuple(np.asarray(values, np.float32).tolist())


def sum_products(
    how: ContractionExecution, operation: Operation, lhs: Operand, rhs_q: QTensor
) -> jax.Array:
    """Contracts two operands that `takes` takes, like `accumulation.sum_products`.

    Args:
        how: execution of the contraction.
        operation: the contraction.
        lhs: left operand, floating.
        rhs_q: rhs quantized.
    """
    constant = dataclasses.replace(rhs_q, unrounded=None)
    leaves, structure = jax.tree.flatten((lhs, constant, operation))
    return _SumOfProducts(how, structure)(*leaves)


@dataclasses.dataclass(frozen=True)
class _SumOfProducts(TargetDependent):
    """The sums of products of floats with codes."""

    is_composite = True

    how: ContractionExecution
    structure: Any
    """Pytree structure of the arguments: lhs, rhs quantized and the operation."""

    def reference(self, *leaves):
        lhs, rhs_q, operation = jax.tree.unflatten(self.structure, leaves)
        how = self.how
        return accumulation.sum_products(how, operation, lhs, rhs_q, None, rhs_q)

    def lowered(self, target, *leaves):
        if not panel_products.is_available(target):
            return self.reference(*leaves)
        lhs, rhs_q, operation = jax.tree.unflatten(self.structure, leaves)
        _, rhs_ca = operation.dims[0]
        _, _, remaining, *_ = operation.axes("rhs")
        sizes = [rhs_q.shape[axis] for axis in remaining]
        products = math.prod(rhs_q.shape[axis] for axis in rhs_ca)
        scale = _scale(self.how, rhs_q)
        scale = dots.of_elements(operation, "rhs", scale, rhs_q.shape)
        scale = scale.transpose(*remaining, *rhs_ca)
        counts = scale.shape[len(sizes) :]
        scale = jnp.broadcast_to(scale, (*sizes, *counts)).reshape(
            -1, math.prod(counts)
        )
        x = exact.float32(lhs).reshape(-1, products)
        is_first = rhs_ca[0] == 0
        shape = (products, -1) if is_first else (-1, products)
        codes = rhs_q.qvalue.reshape(shape)
        # XLA:CPU writes codes of four bits one by one. Bytes have two of one row.
        if self.how.rhs.is_given and codes.shape[1] % 2 == 0:
            codes = lax.bitcast_convert_type(codes, jnp.int4)
        else:
            codes = codes.astype(jnp.uint8)
        sums = table_products.sums_of_columns if is_first else table_products.sums
        out = sums(x, codes, scale, _table(rhs_q.numerics))
        shape = (*lhs.shape[: lhs.ndim - len(rhs_ca)], *sizes)
        return operation.ordered(out.reshape(shape))
