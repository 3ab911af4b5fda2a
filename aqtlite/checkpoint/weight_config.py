"""The config of an operand, from a weight that is quantized already."""

import dataclasses
import operator
from collections.abc import Sequence

from aqtlite import calibration, config
from aqtlite.numerics import IntSymmetric
from aqtlite.qtensor.qtensor import QTensor


def config_of(weight: QTensor, axes: int | Sequence[int]) -> config.Tensor:
    """Returns the config whose grid and blocks hold a weight: `fwd.rhs` of its rule.

    >>> import aqtlite
    >>> import jax.numpy as jnp
    >>> from aqtlite import numerics
    >>> int4 = config.Tensor(
    ...     numerics=numerics.IntSymmetric(bits=4), blocks=config.Blocks(size=32)
    ... )
    >>> config_of(aqtlite.quantize(jnp.ones((6, 64)), int4, axes=1), axes=1) == int4
    True

    Args:
        weight: a weight, as `load_quantized` and `move_weights` return it.
        axes: its contracting axes, as `aqtlite.quantize` takes them: 1 of a linear
            layer (outputs, inputs), 0 of a JAX kernel (inputs, outputs).

    Raises:
        ValueError: if its blocks are split along an axis other than the last of `axes`
            and the last of the others, or if it has offsets.
    """
    if weight.offset is not None:
        raise ValueError(
            f"no config has the offsets of {weight!r}, as GGUF's minima: give its "
            ".dequant()"
        )
    given = (axes,) if isinstance(axes, int) else tuple(axes)
    contracting = sorted(operator.index(axis) % weight.ndim for axis in given)
    remaining = [axis for axis in range(weight.ndim) if axis not in contracting]
    grid = weight.numerics
    if grid is None:
        bits = {"int4": 4, "int8": 8}[weight.qvalue.dtype.name]
        grid = IntSymmetric(bits=bits)
    found = config.Tensor(numerics=grid)
    if grid.zero_point_range is not None:
        found = config.Tensor(numerics=grid, calibration=calibration.MinMax())
    shape, blocks = weight.shape, weight.blocks
    is_whole = [size == block for size, block in zip(shape, blocks, strict=True)]
    if all(is_whole) and weight.size > 1 and any(shape[axis] > 1 for axis in remaining):
        return dataclasses.replace(found, calib_shared_axes="per_tensor")
    *before, last = contracting
    *outer, inner = remaining or (None,)
    rows = 1 if inner is None else blocks[inner]
    is_plain = all(is_whole[axis] for axis in contracting) and rows == 1
    spans_others = all(is_whole[axis] for axis in before)
    others = outer if spans_others else [*before, *outer]
    if any(blocks[axis] > 1 for axis in others if axis is not None):
        raise ValueError(
            f"no config has blocks of {blocks} in a weight of {shape} that is "
            f"contracted along {tuple(contracting)}: give its .dequant()"
        )
    if is_plain:
        return found
    has_others = any(shape[axis] > 1 for axis in before)
    cut = config.Blocks(
        size=blocks[last],
        remaining_size=rows,
        span_others=spans_others and has_others,
    )
    return dataclasses.replace(found, blocks=cut)
