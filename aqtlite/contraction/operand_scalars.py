"""The scalars that are noted about an operand and its rounding (`tapped`).

A program computes them for each operand, forward and backward, so they are reduced in
few kernels: of one pass, and one for each axis whose channels are compared.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.contraction.execution import OperandExecution
from aqtlite.operations import OperandAxes
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization import quantizer
from aqtlite.quantization.seeds import Seeds
from aqtlite.shapes import block_shapes

_CLIPPED_BEYOND = np.float32(1.001)
"""Values this far beyond the largest one that a scale reaches are clipped: the largest
itself may be off by some roundings."""

_SMALLEST = np.finfo(np.float32).tiny


class Scalars(NamedTuple):
    """The scalars noted about an operand, float32 but for the indices."""

    snr: Any
    """Signal-to-noise ratio of its rounding, in dB."""

    clipped: Any
    """Share of its elements beyond the largest value that their scale reaches."""

    flushed: Any
    """Share of its elements that are not zero, and are rounded to zero."""

    largest: Any
    """Largest magnitude."""

    reach: Any
    """Largest magnitude by the largest that its scale reaches, of the fullest channel:
    1 for a dynamic range, more where a static or delayed range clips."""

    not_finite: Any
    """Number of its elements that are NaN or infinite."""

    lost: Any
    """Number of elements that are finite, and are not after rounding."""

    channel: Any
    """int32, index of the channel with the largest magnitude, or of the first that is
    not finite, along `axis`."""

    axis: Any
    """int32, axis of the operand; -1 for none."""

    ratio: Any
    """That channel's largest magnitude by the geometric mean of that of the others."""

    noise: Any
    """int32, a digest of its noise: two operands of one shape and digest have the same
    noise. Zero without noise."""


def decibels(exact: jax.Array, other: jax.Array) -> jax.Array:
    """Returns the power of an array by that of the difference of another, in dB.

    Elements that are not finite count as zeros, so as to see the rest.

    Args:
        exact: float32.
        other: float32, of its shape.
    """
    exact, other = (jnp.where(jnp.isfinite(x), x, 0) for x in (exact, other))
    # Squares of gradients would underflow.
    unit = 1 / jnp.maximum(jnp.abs(exact).max(initial=0), _SMALLEST)
    signal = jnp.sum((exact * unit) ** 2)
    noise = jnp.sum((other * unit - exact * unit) ** 2)
    return 10 * (jnp.log10(signal) - jnp.log10(noise))


def scalars_of(
    x: jax.Array,
    q: QTensor,
    one: OperandExecution,
    axes: OperandAxes,
    seeds: Seeds,
    state: Any,
) -> Scalars:
    """Returns the scalars of an operand.

    Args:
        x: the operand.
        q: the operand, quantized.
        one: its execution.
        axes: its axes.
        seeds: seeds of its noise.
        state: state of its calibration.
    """
    given = x.astype(jnp.float32)
    rounded = dataclasses.replace(q, dtype=np.dtype("float32")).dequant()
    scale = jnp.where(jnp.isfinite(q.scale), jnp.abs(q.scale), 0)
    # Squares of gradients would underflow.
    largest_scale = scale.max(initial=0)
    unit = jnp.where(largest_scale > _SMALLEST, 1 / largest_scale, 1)
    limit, inverse = _reached(q, one, scale)
    sums, (largest, reach) = _reduced(given, rounded, limit, inverse, unit)
    signal, noise, clipped, flushed, not_finite, lost = sums
    size = np.float32(max(x.size, 1))
    channel, axis, ratio = _outlier(given, q.scale.shape)
    return Scalars(
        snr=10 * (jnp.log10(signal) - jnp.log10(noise)),
        clipped=clipped / size,
        flushed=flushed / size,
        largest=largest,
        reach=reach,
        not_finite=not_finite,
        lost=lost,
        channel=channel,
        axis=axis,
        ratio=ratio,
        noise=_digest_of_noise(x, one, axes, seeds, state),
    )


_Arrays = tuple[jax.Array, ...]


def _reduced(
    given: jax.Array,
    rounded: jax.Array,
    limit: jax.Array,
    inverse: jax.Array,
    unit: jax.Array,
) -> tuple[_Arrays, _Arrays]:
    """Reduces an operand in a single pass, a kernel that is compiled fast.

    Args:
        given: the operand, float32.
        rounded: the operand after rounding, float32.
        limit: the largest magnitude that each element's scale reaches.
        inverse: its reciprocal, or 0.
        unit: factor of what is squared.

    Returns:
        The power of the operand and of the rounding error, in units of each other, the
        numbers of elements that are clipped, zeroed, not finite, and lost; and the
        largest magnitude, alone and by what its scale reaches.
    """
    is_finite, is_kept = jnp.isfinite(given), jnp.isfinite(rounded)
    values = jnp.where(is_finite, given, 0)
    magnitudes, scaled = jnp.abs(values), values * unit
    error = jnp.where(is_kept, rounded, 0) * unit - scaled
    counted = (
        magnitudes > limit * _CLIPPED_BEYOND,
        (values != 0) & (rounded == 0),
        ~is_finite,
        is_finite & ~is_kept,
    )
    sums = scaled * scaled, error * error, *(x.astype(jnp.float32) for x in counted)
    extremes = magnitudes, magnitudes * inverse
    added = len(sums)  # JAX keeps `combined`, which is to hold no arrays.

    def combined(left: _Arrays, right: _Arrays) -> _Arrays:
        pairs = list(zip(left, right, strict=True))
        totals = (a + b for a, b in pairs[:added])
        return *totals, *(jnp.maximum(a, b) for a, b in pairs[added:])

    arrays = *sums, *extremes
    start = (np.float32(0),) * len(arrays)
    found = jax.lax.reduce(arrays, start, combined, range(given.ndim))
    return tuple(found[:added]), tuple(found[added:])


def _reached(
    q: QTensor, one: OperandExecution, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The largest magnitude that each element's scale reaches, and its reciprocal.

    Args:
        q: the operand, quantized.
        one: its execution.
        scale: its scale, 0 where that is not finite.
    """
    grid = one.tensor.grid
    if q.zero_point is None:
        limit = scale * np.float32(grid.bound / grid.unit)
    else:
        smallest, largest = grid.zero_point_range or (0, grid.largest_stored)
        ends = jnp.maximum(largest - q.zero_point, q.zero_point - smallest)
        limit = scale * ends.astype(jnp.float32)
    inverse = jnp.where(limit > _SMALLEST, 1 / limit, 0)
    limit = jnp.where(limit > 0, limit, np.float32(np.inf))
    left, right = (
        block_shapes.repeat(x, q.shape, range(q.ndim)) for x in (limit, inverse)
    )
    return left, right


def _outlier(given: jax.Array, scale_shape: Sequence[int]) -> tuple[Any, ...]:
    """The channel that stands out, along an axis that shares scales.

    The largest by the geometric mean of the others: a median would be a sort, which
    takes long to compile. Channels of zeros do not count. Before it goes the first one
    that is not finite, along the axis with the fewest of them: the last one, all those
    of a matrix, or one that shares scales.

    Returns:
        Its index, the axis, and the ratio: infinite for one that is not finite.
    """
    infinite = np.float32(np.inf)
    found = jnp.int32(-1), jnp.int32(-1), jnp.float32(1)
    fewest = jnp.asarray(infinite)
    magnitudes = jnp.where(jnp.isfinite(given), jnp.abs(given), infinite)
    if not given.size:
        return found
    shared = (a > b for a, b in zip(given.shape, scale_shape, strict=True))
    is_small, last = given.ndim <= 2, given.ndim - 1
    axes = [i for i, one in enumerate(shared) if one or is_small or i == last]
    for axis, channels in _channels(magnitudes, axes):
        logs, count, broken, largest, index = _summed_up(channels)
        typical = (logs - jnp.log(largest)) / jnp.maximum(count - 1, 1)
        shares = scale_shape[axis] < channels.size and channels.size > 2
        ratio = jnp.where(count > 1, largest * jnp.exp(-typical), 1)
        is_broken, share = broken > 0, broken / channels.size
        takes = jnp.where(is_broken, share < fewest, (ratio > found[2]) & shares)
        fewest = jnp.where(is_broken, jnp.minimum(share, fewest), fewest)
        there = index, jnp.int32(axis), jnp.where(is_broken, infinite, ratio)
        found = jax.tree.map(functools.partial(jnp.where, takes), there, found)
    return found


def _summed_up(channels: jax.Array) -> _Arrays:
    """Sums up the magnitudes of channels, in a single pass.

    Returns:
        The sum of the logarithms of those that are finite and not zero, their number,
        the number of infinite ones, and the largest magnitude with its first index.
    """
    is_broken = jnp.isinf(channels)
    counts = (channels > 0) & ~is_broken
    logs = jnp.log(jnp.where(counts, channels, 1))
    index = jax.lax.iota(jnp.int32, channels.size)

    def combined(left: _Arrays, right: _Arrays) -> _Arrays:
        added = (a + b for a, b in zip(left[:3], right[:3], strict=True))
        (*_, one, i), (*_, other, k) = left, right
        is_first = (one > other) | ((one == other) & (i < k))
        return *added, jnp.maximum(one, other), jnp.where(is_first, i, k)

    sums = logs, counts.astype(jnp.float32), is_broken.astype(jnp.float32)
    last = np.int32(channels.size)
    start = *(np.float32(0),) * 3, np.float32(0), last
    found: _Arrays = jax.lax.reduce((*sums, channels, index), start, combined, (0,))
    return found


def _channels(x: jax.Array, axes: Sequence[int]) -> Iterator[tuple[int, jax.Array]]:
    """Yields axes with the maximum of each channel along them, in two passes."""
    leading = tuple(range(x.ndim - 1))
    rows = x.max(-1) if set(axes) & set(leading) else x
    for axis in axes:
        others = tuple(i for i in leading if i != axis)
        yield axis, (rows.max(others) if axis in leading else x.max(leading))


def _digest_of_noise(
    x: jax.Array, one: OperandExecution, axes: OperandAxes, seeds: Seeds, state: Any
) -> jax.Array:
    seed = quantizer.seed_of(x, one.tensor, axes, one.path, seeds, state)
    if seed is None:
        return jnp.int32(0)
    words = seed.reshape(-1) * jnp.uint32(0x9E3779B1)
    mixed = (words ^ (words >> 15)) * (
        2 * jnp.arange(words.size, dtype=words.dtype) + 1
    )
    return jax.lax.bitcast_convert_type(mixed.sum(dtype=jnp.uint32) | 1, jnp.int32)
