"""Float32 arithmetic with the same result in every program.

XLA rearranges float arithmetic where it sees how a value was computed: it turns
``(x * c) * s`` into ``x * (c * s)``, and drops the rounding of
``float32 -> bfloat16 -> float32``, in some programs and not in others. The functions
here prevent that at no cost in memory or passes.

What every operand of every contraction goes through is written in `jax.lax`, here and
in the modules that import this one: an operator of `jax.numpy` traces a function of its
own for each shape that it meets, which takes longer than all else in tracing.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering.target import OnCpu, TargetDependent


def algebraic_barrier(x: jax.Array) -> jax.Array:
    """Returns x, and keeps XLA from simplifying across it.

    No factor moves through a clamp, and a clamp uses x once, so that no fusion is split
    at it. An optimization barrier would do as well, but splits the loop that reads x.
    """
    return lax.clamp(np.float32(-np.inf), x, np.float32(np.inf))


def rounded_product(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Computes ``x * scale``, rounded before anything is added to it.

    LLVM contracts a product and a sum (with a bias, a skip connection, the terms of a
    LayerNorm) into one fused multiply-add wherever they meet in one loop, and looks
    through a clamp to the infinities. It does not know that the sign bit of a scale is
    0, so that a bitwise or with it stays.

    Args:
        x: float32.
        scale: float32 that broadcasts to x, positive or NaN.
    """
    # Broadcast once: the partitioner of a mesh moves it between devices once, too.
    scale = jnp.broadcast_to(scale, x.shape)
    words = lax.bitcast_convert_type(lax.mul(x, scale), jnp.uint32)
    sign = lax.bitcast_convert_type(scale, jnp.uint32)
    zero = lax.shift_right_logical(sign, np.uint32(31))
    return lax.bitcast_convert_type(lax.bitwise_or(words, zero), jnp.float32)


@jax.custom_jvp
def scaled(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Computes ``x * factor`` in float32, with x's own rounding in every program.

    Args:
        x: floating; float64 is multiplied as it is.
        factor: float32 that broadcasts to x; a constant for gradients.
    """
    if x.dtype == np.float64:
        return x * factor.astype(x.dtype)
    return algebraic_barrier(float32(x)) * factor


@scaled.defjvp
def _scaled_jvp(primals, tangents):
    (x, factor), (dx, _) = primals, tangents
    out = scaled(x, factor)
    return out, dx.astype(out.dtype) * factor.astype(out.dtype)


def wide_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of products with a scale: float32, or float64 for float64."""
    return np.dtype("float64") if dtype == np.float64 else np.dtype("float32")


def fusion_barrier(x: jax.Array) -> jax.Array:
    """Returns x, and keeps XLA from fusing its computation into what reads it.

    What reads x is then compiled alike whether x is computed or given. XLA:CPU removes
    an optimization barrier before it fuses, but fuses a reduction of several arrays
    with nothing that reads it; on other platforms the barrier stays.

    Args:
        x: any shape. Meant for small arrays: a CPU writes as many int32 beside it.
    """
    return _FusionBarrier()(x)


def sum_of_products(*factors: tuple[jax.Array, jax.Array | np.float32]) -> jax.Array:
    """Computes ``a * b + c * d + ...`` from the left, with each product rounded.

    Unlike `rounded_product` for constants, and for factors of any sign.

    Args:
        factors: pairs that broadcast to one shape, which is meant to be small, as for
            `fusion_barrier`.
    """
    products = jnp.broadcast_arrays(*(a * b for a, b in factors))
    total, *others = fusion_barrier(jnp.stack(products))
    for product in others:
        total = total + product
    return total


@dataclasses.dataclass(frozen=True)
class _FusionBarrier(OnCpu):
    """The identity, as a kernel of its own."""

    def reference(self, x):
        return lax.optimization_barrier(x)

    def on_cpu(self, is_whole, x):
        """Selects x from itself and itself by a reduction."""
        if x.dtype.itemsize == 1 and jnp.issubdtype(x.dtype, jnp.floating):
            # XLA:CPU computes with such floats by widening them.
            bits = self.on_cpu(is_whole, lax.bitcast_convert_type(x, jnp.uint8))
            return lax.bitcast_convert_type(bits, x.dtype)
        pair = lax.broadcast(x, (2,))
        position = lax.broadcasted_iota(jnp.int32, pair.shape, 0)

        def later(one, other):
            is_later = lax.ge(other[1], one[1])
            return lax.select(is_later, other[0], one[0]), lax.max(one[1], other[1])

        start = np.zeros((), x.dtype), np.int32(-1)
        return lax.reduce((pair, position), start, later, (0,))[0]


def float32(x: jax.Array) -> jax.Array:
    """Converts x to float32, with x's own rounding in every program.

    An explicit reduction of the precision, which XLA keeps, repeats the rounding to
    bfloat16 or float16 that it may have skipped; to a value that was rounded already it
    does nothing.

    >>> float32(jnp.array([1 / 3], jnp.bfloat16)).tolist()
    [0.333984375]
    """
    wide = lax.convert_element_type(x, jnp.float32)
    if x.dtype == jnp.bfloat16:
        return lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=7)
    if x.dtype == jnp.float16:
        # reduce_precision flushes what float16 stores as subnormal: multiples of
        # 2^-24, below 2^-14.
        steps = lax.round(wide * 2.0**24, lax.RoundingMethod.TO_NEAREST_EVEN)
        normal = lax.reduce_precision(wide, exponent_bits=5, mantissa_bits=10)
        return jnp.where(jnp.abs(wide) < 2.0**-14, steps * 2.0**-24, normal)
    return wide


def nearest_integer(x: jax.Array) -> jax.Array:
    """Rounds float32 to int32, half to even.

    x must be within 2^22; NaN gives some integer or other. The result has no gradient.
    """
    return _NearestInteger()(lax.stop_gradient(x))


@dataclasses.dataclass(frozen=True)
class _NearestInteger(TargetDependent):
    """The nearest integer of floats within 2^22."""

    def reference(self, x):
        # Floats from 2^23 to 2^24 are the integers, in the order of their bits: adding
        # 1.5 * 2^23 rounds x, and leaves it in the lowest bits. A conversion, which
        # looks for NaN and overflow, takes longer.
        anchor = np.float32(1.5 * 2.0**23)
        x = lax.convert_element_type(x, jnp.float32)
        bits = lax.bitcast_convert_type(lax.add(x, anchor), jnp.int32)
        return lax.sub(bits, anchor.view(np.int32))

    def lowered(self, target, x):
        if not target.is_gpu:
            return self.reference(x)
        # XLA:GPU (jax 0.11.2) converts a float, and to -1, where it is to narrow the
        # bits of the float to int8 or int16.
        whole = lax.round(x.astype(jnp.float32), lax.RoundingMethod.TO_NEAREST_EVEN)
        return whole.astype(jnp.int32)
