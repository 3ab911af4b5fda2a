"""Convolutions of stored integers, exact on every platform."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from aqtlite.lowering import digits, patches, phases
from aqtlite.lowering.convolution import Convolution
from aqtlite.lowering.target import TargetDependent


def integer_conv(
    lhs: jax.Array,
    rhs: jax.Array,
    convolution: Convolution,
    *,
    largest: digits.Magnitudes = (None, None),
    out_sharding: NamedSharding | None = None,
) -> jax.Array:
    """Convolves stored integers.

    Args:
        lhs: int4, int8, int16, or int32 up to `digits.LARGEST_OF_THREE`.
        rhs: the same.
        convolution: the convolution.
        largest: the largest magnitudes in lhs and rhs; None for that of the dtype,
            without its minimum.
        out_sharding: of the result.

    Returns:
        The exact sums in int32 where int32 is certain to hold them. Otherwise float32:
        exact sums of pieces, or of digits, that int32 does hold, added there.
    """
    bounds = digits.magnitudes(lhs, rhs, largest)
    fitting = (2**31 - 1) // (bounds[0] * bounds[1])
    is_wide = any(jnp.iinfo(x.dtype).bits > 8 for x in (lhs, rhs))
    piece = (2**31 - 1) // digits.LARGEST**2 if is_wide else fitting
    products = convolution.products(rhs.shape)
    # A symbolic size (jax.export) is taken to fit: it cannot be split.
    is_known = isinstance(products, int)
    shape = convolution.output_shape(lhs.shape, rhs.shape)
    if 0 in (*lhs.shape, *rhs.shape, *shape):
        return jnp.zeros(shape, jnp.int32)
    run = functools.partial(_wide, bounds=bounds) if is_wide else _narrow
    if is_known and products > piece:
        return _in_pieces(run, lhs, rhs, convolution, out_sharding, piece)
    sum_dtype = jnp.float32 if is_known and products > fitting else jnp.int32
    return run(lhs, rhs, convolution, out_sharding, sum_dtype)


def _narrow(lhs, rhs, convolution, out_sharding, sum_dtype):
    """Convolves int4 and int8."""
    sums = _NarrowConvolution(convolution, out_sharding)(lhs, rhs)
    return sums.astype(sum_dtype)


def _wide(lhs, rhs, convolution, out_sharding, sum_dtype, bounds):
    """Convolves int16 and int32 in int8 digits."""
    left, right = (
        [x]
        if jnp.iinfo(x.dtype).bits <= 8
        else list(digits.of_integers(x, 2 if one <= digits.LARGEST_OF_TWO else 3))
        for x, one in zip((lhs, rhs), bounds, strict=True)
    )
    sums = [
        [_narrow(a, b, convolution, out_sharding, sum_dtype) for b in right]
        for a in left
    ]
    return _combined([_combined(row) for row in sums])


def _combined(sums: list[jax.Array]) -> jax.Array:
    """Puts together the sums of each digit's products."""
    return digits.combine(jnp.stack(sums), 0)


@dataclasses.dataclass(frozen=True)
class _NarrowConvolution(TargetDependent):
    """A convolution of int4 and int8, to int32."""

    convolution: Convolution
    out_sharding: NamedSharding | None

    def reference(self, lhs, rhs):
        lhs, rhs = lhs.astype(jnp.int8), rhs.astype(jnp.int8)
        return self.convolution(lhs, rhs, jnp.int32, self.out_sharding)

    def lowered(self, target, lhs, rhs):
        # TPUs convolve int8. XLA:GPU has int8 convolutions only to float32 or int8
        # (jax-ml/jax#7637), and XLA:CPU a plain loop for some.
        if target.platform in ("tpu", "other") or self.out_sharding is not None:
            return self.reference(lhs, rhs)
        lhs, rhs = lhs.astype(jnp.int8), rhs.astype(jnp.int8)
        run = functools.partial(patches.conv, target=target)
        return phases.conv(lhs, rhs, self.convolution, run)


def _in_pieces(run, lhs, rhs, convolution, out_sharding, piece):
    """Adds up convolutions with parts of the kernel, in float32.

    The kernel is cut along its input features, and then along its window.
    """
    _, features, *window = convolution.rhs_spec
    total = None
    sizes = [rhs.shape[axis] for axis in (features, *window)]
    steps = []
    for index, size in enumerate(sizes):
        # Of the axes behind this one, all is taken while that fits.
        rest = int(np.prod(sizes[index + 1 :]))
        steps.append(min(size, max(1, piece // rest)))
    starts = (range(0, size, step) for size, step in zip(sizes, steps, strict=True))
    for start in itertools.product(*starts):
        stop = [
            min(a + step, size)
            for a, step, size in zip(start, steps, sizes, strict=True)
        ]
        part = _part(lhs, rhs, convolution, start, stop)
        one = run(*part, out_sharding, jnp.float32)
        total = one if total is None else total + one
    return total


def _part(lhs, rhs, convolution, start, stop):
    """The operands and the convolution with a part of the kernel."""
    _, features, *window = convolution.rhs_spec
    size = rhs.shape[features]
    padding = []
    for axis, first, last, (low, high), dilation in zip(
        window,
        start[1:],
        stop[1:],
        convolution.padding,
        convolution.rhs_dilation,
        strict=True,
    ):
        behind = rhs.shape[axis] - last
        padding.append((low - first * dilation, high - behind * dilation))
        rhs = lax.slice_in_dim(rhs, first, last, axis=axis)
    rhs = lax.slice_in_dim(rhs, start[0], stop[0], axis=features)
    axis, groups = convolution.lhs_spec[1], convolution.feature_groups
    shape = lhs.shape
    lhs = lhs.reshape(*shape[:axis], groups, size, *shape[axis + 1 :])
    lhs = lax.slice_in_dim(lhs, start[0], stop[0], axis=axis + 1)
    lhs = lhs.reshape(*shape[:axis], -1, *shape[axis + 1 :])
    return lhs, rhs, dataclasses.replace(convolution, padding=tuple(padding))
