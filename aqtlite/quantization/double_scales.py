"""Scales of frozen weights that are held in 8 bits, around their mean."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite import config
from aqtlite.lowering import exact
from aqtlite.lowering.sums import Sum
from aqtlite.numerics import DynamicTree
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization.quantize import quantize
from aqtlite.shapes import block_shapes

_SMALLEST = np.float32(2.0**-126)


def encoded(q: QTensor, how: config.DoubleScales) -> QTensor:
    """Returns a weight whose `scale` is a `QTensor` with an `offset`, their mean.

    Args:
        q: the weight, with scales in float32.
        how: the size of the blocks of scales.
    """
    blocks = config.Blocks(size=how.size, fit=True)
    sizes = [size // blocks.count_of(size) for size in q.scale.shape]
    axis = max(range(q.scale.ndim), key=lambda i: (sizes[i], i))
    return _in_blocks(q, blocks, axis)


def stored(**arrays: Any) -> QTensor:
    """Scales of a weight as `encoded` makes them, of its fields that are arrays.

    Args:
        **arrays: "qvalue", codes of the dynamic grid; "scale", those of blocks of
            codes; "offset", the mean.
    """
    return QTensor(**arrays, dtype=np.dtype(np.float32), numerics=DynamicTree())


def encoded_like(q: QTensor, scale: QTensor) -> QTensor:
    """Encodes the scales of a weight in the blocks of those of another of its shape."""
    counts = zip(scale.shape, scale.scale.shape, strict=True)
    size, axis = max((n // count, i) for i, (n, count) in enumerate(counts))
    return _in_blocks(q, config.Blocks(size=size, fit=True), axis)


def _in_blocks(q: QTensor, blocks: config.Blocks, axis: int) -> QTensor:
    mean = _mean(q.scale)
    tensor = config.Tensor(numerics=DynamicTree(), blocks=blocks)
    codes = quantize(q.scale - mean, tensor, axis)
    return dataclasses.replace(
        q, scale=stored(qvalue=codes.qvalue, scale=codes.scale, offset=mean)
    )


def _mean(scale: jax.Array) -> jax.Array:
    """The mean of scales that are not NaN, keepdims, equal on any number of devices."""
    is_number = ~jnp.isnan(scale)
    axes = tuple(range(scale.ndim))
    total = Sum(axes)(jnp.where(is_number, scale, 0))
    count = jnp.sum(is_number, dtype=jnp.int32).astype(jnp.float32)
    return lax.expand_dims(total / count, axes)


def decoded(q: QTensor) -> QTensor:
    """Returns a weight with its scales in float32, one result in every program.

    Args:
        q: the weight, from `encoded`; others are returned unchanged.
    """
    codes = q.scale
    if not isinstance(codes, QTensor):
        return q
    grid, axes = codes.numerics, range(codes.ndim)
    assert grid is not None
    outer = block_shapes.repeat(codes.scale, codes.shape, axes)
    rest = exact.rounded_product(grid.decode(codes.qvalue), outer)
    # Rounding may lead a small scale below zero.
    scale: jax.Array = jnp.maximum(rest + codes.offset, _SMALLEST)
    return dataclasses.replace(q, scale=scale)
