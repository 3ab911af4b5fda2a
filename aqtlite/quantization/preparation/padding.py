"""Padding of operands with zeros to whole blocks (``config.Blocks(pad=True)``).

Along contracting axes both operands are padded, and products of zeros add nothing to
the sums; along other axes the padding is cropped from the result.
"""

import dataclasses
import math
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite import config
from aqtlite.operations import SIDES, Operation
from aqtlite.operations.base import OperandAxes
from aqtlite.qtensor import shape_operations, stored_values
from aqtlite.qtensor.qtensor import Operand, QTensor
from aqtlite.shapes.sharding import explicit_spec, whole_where_uneven

Shape = tuple[int, ...]


def pad_operands(
    operation: Operation,
    lhs: Operand,
    rhs: Operand,
    tensors: tuple[config.Tensor, config.Tensor],
    path: str,
) -> tuple[Operand, Operand]:
    """Pads operands along axes that their blocks do not divide.

    Args:
        operation: the contraction. One that does not pair elements is not padded, and
            `granularity.layout` refuses blocks that do not divide its axes.
        lhs: left operand, an array or a `QTensor` in its own order.
        rhs: right operand, like `lhs`.
        tensors: configs of the operands.
        path: path of the contraction, for error messages.

    Returns:
        The operands, unchanged if no config asks for padding. The padding of a
        `QTensor` counts as elements.

    Raises:
        ValueError: if no size is a whole number of blocks for both operands, if a grid
            has no zero, or if zeros would change a range.
    """
    given = lhs, rhs
    if not operation.pairs_elements or not any(map(_asks, given, tensors)):
        return lhs, rhs
    whole = [
        dataclasses.replace(x.in_own_order(), padding=None)
        if isinstance(x, QTensor)
        else x
        for x in given
    ]
    sizes = [list(x.shape) for x in whole]
    axes = [operation.axes(side) for side in SIDES]
    pairs = list(zip(axes[0].contracting, axes[1].contracting, strict=True))
    for pair in pairs:
        is_last = pair == pairs[-1]
        blocks = [
            _block(x, tensor, axis, is_last, f"{path}.{side}")
            for x, tensor, axis, side in zip(whole, tensors, pair, SIDES, strict=True)
        ]
        size = _whole(max(map(operator.getitem, sizes, pair)), *blocks)
        for one, x, axis in zip(sizes, whole, pair, strict=True):
            if size != x.shape[axis]:
                _check_blocks(size, blocks, whole, tensors, pair, path)
            one[axis] = size
    for pair in zip(axes[0].batch, axes[1].batch, strict=True):
        # Blocks may cut the last axis that is not contracted, even a batch axis.
        blocks = [
            _kept_block(x, tensor, axis, its)
            for x, tensor, axis, its in zip(whole, tensors, pair, axes, strict=True)
        ]
        size = _whole(max(map(operator.getitem, sizes, pair)), *blocks)
        for one, axis in zip(sizes, pair, strict=True):
            one[axis] = size
    for one, x, tensor, its in zip(sizes, whole, tensors, axes, strict=True):
        for axis in its.remaining:
            one[axis] = _whole(one[axis], _kept_block(x, tensor, axis, its))
    left, right = (
        _padded(x, tuple(one), tensor, f"{path}.{side}")
        for x, one, tensor, side in zip(whole, sizes, tensors, SIDES, strict=True)
    )
    return left, right


def _whole(size: int, *blocks: int) -> int:
    """Rounds a size up to whole blocks of every size given."""
    block = math.lcm(*blocks)
    return -(-size // block) * block


def pad_array(
    x: jax.Array, tensor: config.Tensor, axes: OperandAxes, path: str
) -> jax.Array:
    """Pads one array along axes that its blocks do not divide.

    Args:
        x: floating.
        tensor: config of the array.
        axes: axes of the array.
        path: path of the config, for error messages.
    """
    blocks = tensor.blocks
    if blocks is None or not blocks.pad:
        return x
    sizes = list(x.shape)
    others = [axis for axis in range(x.ndim) if axis not in axes.contracting]
    for axis in axes.cuttable[-1:]:
        sizes[axis] = blocks.padded(sizes[axis])
    if others:
        sizes[others[-1]] = blocks.padded_remaining(sizes[others[-1]])
    _check_has_zero(x, tuple(sizes), tensor, path)
    return _with_zeros(x, tuple(sizes), tensor)


def widths(x: Operand, like: Operand) -> Shape | None:
    """Returns the number of zeros padded to each axis, None if there are none.

    Args:
        x: the padded operand.
        like: the operand before padding.
    """
    found = tuple(new - old for new, old in zip(x.shape, like.shape, strict=True))
    return found if any(found) else None


def crop(out: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Crops a result to its shape without padding."""
    return lax.slice(whole_where_uneven(out, shape), (0,) * out.ndim, shape)


def _asks(x: Operand, tensor: config.Tensor) -> bool:
    if isinstance(x, QTensor):
        return x.padding is not None
    return tensor.blocks is not None and tensor.blocks.pad


def _block(
    x: Operand, tensor: config.Tensor, axis: int, is_last: bool, path: str
) -> int:
    """The size of the blocks along a contracting axis, 1 without blocks."""
    size = x.shape[axis]
    if isinstance(x, QTensor):
        count = x.scale.shape[axis]
        return 1 if count <= 1 else size // count
    if tensor.blocks is None or not is_last or not size:
        return 1
    padded = tensor.blocks.padded(size)
    try:
        return padded // tensor.blocks.count_of(padded)
    except ValueError as error:
        raise ValueError(
            f"{path}.blocks.{error}, of an operand of shape {tuple(x.shape)}; set "
            f"{path}.blocks.pad=True, as for the other operand"
        ) from error


def _kept_block(x: Operand, tensor: config.Tensor, axis: int, axes: OperandAxes) -> int:
    """The size of the blocks along a kept axis, 1 where no blocks are padded."""
    if isinstance(x, QTensor):
        count = x.scale.shape[axis]
        return 1 if count <= 1 else x.shape[axis] // count
    blocks = tensor.blocks
    is_last = axis == max(axes.batch + axes.remaining)
    return blocks.remaining_size if blocks and blocks.pad and is_last else 1


def _check_blocks(
    size: int,
    blocks: Sequence[int],
    operands: Sequence[Operand],
    tensors: Sequence[config.Tensor],
    pair: tuple[int, int],
    path: str,
) -> None:
    """Raises ValueError if padding changes the block sizes, or they do not align."""
    is_regular = max(blocks) % min(blocks) == 0
    for x, tensor, block in zip(operands, tensors, blocks, strict=True):
        if not isinstance(x, QTensor) and tensor.blocks is not None and is_regular:
            is_regular = size // tensor.blocks.count_of(size) == block
    if not is_regular:
        (lhs, rhs), (axis, _) = (one.blocks for one in tensors), pair
        raise ValueError(
            f"{path}.lhs.blocks={lhs!r} and {path}.rhs.blocks={rhs!r} do not go "
            f"together: of a contracting axis of {operands[0].shape[axis]} they are "
            f"blocks of {blocks[0]} and {blocks[1]}, which padding cannot align. "
            "Give both pad=True, and sizes of which one divides the other"
        )


def _padded(x: Operand, shape: Shape, tensor: config.Tensor, path: str) -> Operand:
    if tuple(x.shape) == shape:
        return x
    _check_has_zero(x, shape, tensor, path)
    if isinstance(x, QTensor):
        pairs = [(0, new - old) for new, old in zip(shape, x.shape, strict=True)]
        return shape_operations.pad(x, pairs)
    if tensor.is_quantized and not tensor.calibration.ignores_zeros:
        raise ValueError(
            f"{path}.calibration={tensor.calibration!r}, of an operand of shape "
            f"{tuple(x.shape)}: zeros that pad it to whole blocks of the other "
            f"operand, {shape}, would change its range. Use calibration.AbsMax(), "
            "blocks that divide the axis, or Blocks(fit=True)"
        )
    return _with_zeros(x, shape, tensor)


def _with_zeros(x: jax.Array, shape: Shape, tensor: config.Tensor) -> jax.Array:
    """Pads an array; behind NaN and infinities with NaN where a range hides them.

    The ends of rows are looked at there (`aqtlite.contraction.poison`).
    """
    x = whole_where_uneven(x, shape)
    hides_nan = tensor.is_quantized and tensor.calibration.is_blind
    if not hides_nan or 0 in x.shape or explicit_spec(x) is not None:
        pairs = [(0, new - old) for new, old in zip(shape, x.shape, strict=True)]
        return jnp.pad(x, pairs)
    for axis, (new, old) in enumerate(zip(shape, x.shape, strict=True)):
        if new != old:
            last = lax.stop_gradient(lax.slice_in_dim(x, old - 1, old, axis=axis))
            sizes = (*x.shape[:axis], new - old, *x.shape[axis + 1 :])
            zeros = jnp.broadcast_to(last - last, sizes)
            x = lax.concatenate([x, zeros], axis)
    return x


def _check_has_zero(x: Operand, shape: Shape, tensor: config.Tensor, path: str) -> None:
    if tuple(x.shape) == shape or not tensor.is_quantized:
        return
    grid = tensor.grid
    if grid.zero_point_range is None and stored_values.zero(grid) is None:
        raise ValueError(
            f"{path}.numerics={grid!r} has no zero to pad an operand of shape "
            f"{tuple(x.shape)} with; choose blocks that divide it, or fit=True"
        )
