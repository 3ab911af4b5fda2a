"""Rows of a quantized table, as a lookup reads them.

The table is quantized like the rhs of a contraction with all axes but that of the rows,
so that the same integers serve lookups and logits.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from aqtlite import config
from aqtlite.contraction import differentiation, straight_through
from aqtlite.lowering import exact
from aqtlite.operations import OperandAxes
from aqtlite.qtensor import qtensor as qtensor_lib
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization import checks, granularity
from aqtlite.shapes import block_shapes

PATH = "fwd.rhs"
"""The operand of a config that quantizes a table."""


def check(cfg: config.DotGeneral) -> None:
    """Checks that a config computes the scales of a table from the table alone.

    Raises:
        ValueError: if not; the message names the field.
    """
    tensor = cfg.fwd.rhs
    if tensor.rounding is not None:
        raise ValueError(
            f"{PATH}.rounding={tensor.rounding!r} rounds weights by the inputs that "
            f"they are contracted with, and a lookup has none: set {PATH}.rounding to "
            "None"
        )
    if tensor.sparsity is not None:
        raise ValueError(
            f"{PATH}.sparsity={tensor.sparsity!r} prunes weights that are contracted, "
            f"and a lookup reads rows: set {PATH}.sparsity to None"
        )
    if cfg.fwd.rotation is not None:
        raise ValueError(
            f"fwd.rotation={cfg.fwd.rotation!r} rotates the table, and a lookup would "
            "return rotated rows: take the rows of the float table, or set "
            "fwd.rotation to None"
        )
    needs_state = tensor.is_quantized and tensor.calibration.needs_state
    if cfg.fwd.smoothing is not None or needs_state:
        what = (
            f"{PATH}.calibration={tensor.calibration!r}"
            if cfg.fwd.smoothing is None
            else "fwd.smoothing"
        )
        raise ValueError(
            f"{what} takes the scale of a table from what it is contracted with, or "
            "from earlier steps, and a lookup has neither: take the rows of the float "
            "table, or choose another calibration"
        )


def check_blocks(
    tensor: config.Tensor, shape: tuple[int, ...], axes: OperandAxes
) -> None:
    """Checks that blocks divide the rows of a table: padded ones are only contracted.

    Args:
        tensor: config of the table.
        shape: its shape.
        axes: its axes.

    Raises:
        ValueError: if they do not.
    """
    granularity.layout(tensor, shape, axes, PATH)


def quantized(table: jax.Array, tensor: config.Tensor, axes: OperandAxes) -> QTensor:
    """Quantizes a float table to the nearest values, with a gradient straight through.

    Args:
        table: floating-point table.
        tensor: its config.
        axes: its axes; all but that of the rows are contracting.
    """
    nearest = tensor.to_nearest()
    q = straight_through.quantized(table, nearest, axes, PATH)
    checks.check_scale(q.scale.shape, nearest, axes, PATH)
    return q


@jax.named_scope(differentiation.SCOPE)
def rows(table: QTensor, axis: int, take: Callable[[Any], jax.Array]) -> jax.Array:
    """Returns rows of a quantized table, dequantized.

    Args:
        table: the table.
        axis: axis of its rows.
        take: function that takes rows of any array with the table's rank and number of
            rows. If it fills rows out of range, floats with NaN.
    """
    table = table.in_own_order()
    count = table.scale.shape[axis]
    if table.padding is not None or count not in (1, table.shape[axis]):
        return take(table.dequant())

    def of_scales(x: jax.Array) -> jax.Array:
        # Each row has its scale, which is NaN for rows out of range.
        sizes = (*x.shape[:axis], table.shape[axis], *x.shape[axis + 1 :])
        return take(jnp.broadcast_to(x, sizes))

    return _dequantized(qtensor_lib.rearrange(table, take, of_scales))


def _dequantized(q: QTensor) -> jax.Array:
    """Returns `q.dequant()` with products that are rounded before sums in any program.

    Rows are added to others, as to those of positions.
    """
    ones, wide = jnp.ones_like(q.scale), jnp.dtype("float32")
    values = dataclasses.replace(q, scale=ones, dtype=wide, unrounded=None).dequant()
    scale = block_shapes.repeat(q.scale, values.shape, range(values.ndim))
    out = exact.rounded_product(values, scale).astype(q.dtype)
    return (
        out if q.unrounded is None else qtensor_lib.straight_through(out, q.unrounded)
    )
