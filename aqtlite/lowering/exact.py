"""Float32 arithmetic with the same result in every program.

XLA rearranges float arithmetic where it sees how a value was computed: it turns
``(x * c) * s`` into ``x * (c * s)``, and drops the rounding of
``float32 -> bfloat16 -> float32``, in some programs and not in others. The functions
here prevent that at no cost in memory or passes.

Code that runs for every operand of every contraction uses `jax.lax`, here and in the
modules that import this one: operators of `jax.numpy` trace a function of their own for
each shape, which would dominate tracing time.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering.elementwise import Elementwise, ElementwiseOnTarget, spread


def algebraic_barrier(x: jax.Array) -> jax.Array:
    """Returns `x`, float32, and keeps XLA from simplifying across it.

    XLA moves no factor through a reduction of precision, and fuses it. A minimum with
    infinity would be simplified away, as is a reduction to float32's own precision on
    GPUs; this one names a mantissa of one bit more. An optimization barrier would split
    the loop that reads `x`.
    """
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=24)


def on_squeezed(
    function: Callable[..., jax.Array], x: jax.Array, *others: jax.Array
) -> jax.Array:
    """Applies an elementwise function to arrays without the axes of size one of `x`.

    XLA drops such axes at every reduction and broadcast, which takes a reshape each.

    Args:
        function: function whose result may have further, leading axes.
        x: any shape.
        others: arrays of the rank of `x`, with size 1 where it has.
    """
    axes = tuple(axis for axis, size in enumerate(x.shape) if size == 1)
    out = function(*(lax.squeeze(one, axes) for one in (x, *others)))
    leading = out.ndim + len(axes) - x.ndim
    return lax.expand_dims(out, [axis + leading for axis in axes])


def rounded_product(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Computes ``x * scale``, rounded before anything is added to it.

    LLVM contracts a product and a sum (with a bias, a skip connection, the terms of a
    LayerNorm) to a fused multiply-add wherever they meet in one loop, and sees through
    an algebraic barrier. It keeps a bitwise or with the sign of the product, which it
    does not know.

    Args:
        x: float32.
        scale: float32 that broadcasts to `x`. The sign of one factor at most is known:
            that of a constant, or of a magnitude found in the same loop.
    """
    # Broadcast once, so that XLA's partitioner moves it between devices only once.
    scale = spread(scale, x.shape)
    return _ROUNDED_PRODUCT(x, scale)


def _rounded_product(x: jax.Array, scale: jax.Array) -> jax.Array:
    product, *factors = (
        lax.bitcast_convert_type(one, jnp.uint32)
        for one in (lax.mul(x, scale), x, scale)
    )
    # Of both, as the scale of a weight that a program closes over is a constant.
    sign = lax.bitwise_and(lax.bitwise_xor(*factors), np.uint32(1 << 31))
    return lax.bitcast_convert_type(lax.bitwise_or(product, sign), jnp.float32)


_ROUNDED_PRODUCT = Elementwise(_rounded_product)


def scaled_integers(integers: jax.Array, scales: Sequence[jax.Array]) -> jax.Array:
    """Multiplies integers by scales, from the left, and rounds before an addition.

    As `rounded_product`, in fewer operations: a fused multiply-add of the product and a
    zero rounds the product. The zero is that of the integer's sign, which LLVM does not
    know, so that an underflow keeps its sign.

    Args:
        integers: int32, any shape.
        scales: at least one; float32, not negative, broadcast to `integers`.
    """
    return _SCALED_INTEGERS(
        lax.convert_element_type(integers, jnp.float32),
        *(spread(scale, integers.shape) for scale in scales),
    )


def _scaled_integers(x: jax.Array, *scales: jax.Array) -> jax.Array:
    product = functools.reduce(lax.mul, scales, x)
    return lax.add(product, lax.mul(x, np.float32(0)))


_SCALED_INTEGERS = Elementwise(_scaled_integers)


@jax.custom_jvp
def scaled(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Computes ``x * factor`` in float32, from `x` rounded to its own dtype.

    Args:
        x: floating; float64 is multiplied in float64.
        factor: float32 that broadcasts to `x`; a constant to differentiation.
    """
    factor = spread(factor, x.shape)
    if x.dtype == np.float64:
        return x * factor.astype(x.dtype)
    return lax.mul(algebraic_barrier(float32(x)), factor)


@scaled.defjvp
def _scaled_jvp(primals, tangents):
    (x, factor), (dx, _) = primals, tangents
    out = scaled(x, factor)
    return out, dx.astype(out.dtype) * factor.astype(out.dtype)


def wide_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype of products with a scale: float32, or float64 for float64."""
    return np.dtype("float64") if dtype == np.float64 else np.dtype("float32")


def float32(x: jax.Array) -> jax.Array:
    """Converts `x` to float32, from its value rounded to its own dtype.

    XLA may skip the rounding to bfloat16 or float16. An explicit reduction of
    precision, which XLA keeps, repeats it; it does not change rounded values.

    >>> float32(jnp.array([1 / 3], jnp.bfloat16)).tolist()
    [0.333984375]
    """
    wide = lax.convert_element_type(x, jnp.float32)
    if x.dtype == jnp.bfloat16:
        return lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=7)
    if x.dtype == jnp.float16:
        # reduce_precision flushes float16's subnormals: multiples of 2^-24, below
        # 2^-14.
        steps = lax.round(wide * 2.0**24, lax.RoundingMethod.TO_NEAREST_EVEN)
        normal = lax.reduce_precision(wide, exponent_bits=5, mantissa_bits=10)
        return jnp.where(jnp.abs(wide) < 2.0**-14, steps * 2.0**-24, normal)
    return wide


def rounded(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Converts `x` to a float dtype, and keeps XLA from skipping the rounding.

    XLA drops a conversion to bfloat16 that is converted back to float32. The rounding
    is repeated in what reads the result, because Triton's products write the result of
    a conversion, but not that of a reduction of precision.
    """
    narrow = lax.convert_element_type(x, dtype)
    if narrow.dtype not in (jnp.bfloat16, jnp.float16):
        return narrow
    return lax.convert_element_type(float32(narrow), dtype)


# Floats from 2^23 to 2^24 are the integers, in the order of their bits: adding this one
# rounds, and leaves the integer in the lowest bits. A conversion, which checks for NaN
# and overflow, takes longer.
_ANCHOR = np.float32(1.5 * 2.0**23)


def nearest_integer(x: jax.Array, dtype: jax.typing.DTypeLike = jnp.int32) -> jax.Array:
    """Rounds float32 to integers, half to even.

    NaN gives an arbitrary integer. The result has no gradient.

    Args:
        x: float32, of magnitude up to 2^22, which rounds to values of `dtype`.
        dtype: int32, int16, int8 or int4.
    """
    return _NearestInteger(np.dtype(dtype))(lax.stop_gradient(x))


@dataclasses.dataclass(frozen=True)
class _NearestInteger(ElementwiseOnTarget):
    """The nearest integer of floats within 2^22."""

    dtype: np.dtype

    def reference(self, x):
        whole = lax.sub(self._anchored(x), _ANCHOR.view(np.int32))
        return lax.convert_element_type(whole, self.dtype)

    def _anchored(self, x):
        x = lax.convert_element_type(x, jnp.float32)
        return lax.bitcast_convert_type(lax.add(x, _ANCHOR), jnp.int32)

    def lowered(self, target, x):
        if target.platform == "cpu" and self.dtype != jnp.int32:
            # The lowest 22 bits of the anchor are zeros.
            return lax.convert_element_type(self._anchored(x), self.dtype)
        if not target.is_gpu:
            return self.reference(x)
        # XLA:GPU (jax 0.11.2) miscompiles narrowing the bits of a float to int8 or
        # int16: it converts the float itself, and to -1.
        whole = lax.round(x.astype(jnp.float32), lax.RoundingMethod.TO_NEAREST_EVEN)
        return whole.astype(jnp.int32).astype(self.dtype)
