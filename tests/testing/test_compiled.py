"""Assertions about compiled programs hold where they should, and name the layer."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas

import aqtlite
from aqtlite import testing
from tests.common import MATMUL, nearest, normal

pytestmark = pytest.mark.code("quick")

X, W = normal((16, 32)), normal((32, 32), 1)
INT8 = aqtlite.make_dot_general(nearest())


def two_layers(dot, w, x):
    for name, used in (("first", INT8), ("second", dot)):
        with jax.named_scope(name):
            x = used(x, w, MATMUL)
    return x


def test_quantized():
    testing.assert_quantized(two_layers, INT8, W, X)
    wanted = (
        r"50\.0% of .* less than 99\.0%.*\n  second \(forward, 'ab,bc->ac'\).*50\.0%"
    )
    with pytest.raises(AssertionError, match=wanted):
        testing.assert_quantized(two_layers, jax.lax.dot_general, W, X)
    testing.assert_quantized(two_layers, jax.lax.dot_general, W, X, min_share=0.5)


def test_other_floats_in_the_name_of_float8():
    fp8 = aqtlite.make_dot_general(aqtlite.config.fp8())
    wanted = r"in (float32|bfloat16) for float8_e4m3fn"  # the processor decides
    with pytest.raises(AssertionError, match=wanted):
        testing.assert_quantized(fp8, X, W, MATMUL)
    testing.assert_quantized(fp8, X, W, MATMUL, platform="cuda")


def test_floats_in_a_kernel_of_pallas():
    """The compiled program names no product of theirs, and they count all the same."""

    def kernel(x, w, out):
        out[...] = x[...] @ w[...]

    def layers(w, x):
        grid = {"grid": (2,), "out_specs": pallas.BlockSpec((8, 128), lambda i: (i, 0))}
        specs = [grid["out_specs"], pallas.BlockSpec((128, 128), lambda i: (0, 0))]
        shape = jax.ShapeDtypeStruct((16, 128), "float32")
        with jax.named_scope("kernel"):
            x = pallas.pallas_call(kernel, shape, in_specs=specs, **grid)(x, w)
        return INT8(x, w, MATMUL)

    shapes = (jax.ShapeDtypeStruct((n, 128), "float32") for n in (128, 16))
    with pytest.raises(AssertionError, match=r"(?s)50\.0% of .*\n  kernel .*50\.0%"):
        testing.assert_quantized(layers, *shapes, platform="tpu")


def test_what_cannot_be_asserted():
    with pytest.raises(ValueError, match="sin contracts nothing"):
        testing.assert_quantized(jnp.sin, X)
    with pytest.raises(ValueError, match=r"between 0 and 1, got 99"):
        testing.assert_quantized(jnp.sin, X, min_share=99)


def test_no_float_copy_of_a_frozen_weight():
    q = aqtlite.quantize(W, nearest().fwd.rhs, (0,))

    def dequantized(q, x):
        with jax.named_scope("layer"):
            return jnp.sin(x) @ q.dequant()

    def integers(q, x):
        return INT8(x, q, MATMUL)

    testing.assert_no_float_copy(integers, q, X)
    with pytest.raises(AssertionError, match=r"1 float copies .*\n  q.*qvalue.*layer"):
        testing.assert_no_float_copy(dequantized, q, X)
    with pytest.raises(ValueError, match=r"no argument of integers .* 8 bits"):
        testing.assert_no_float_copy(integers, W, X)
    with pytest.raises(ValueError, match="platform='cuda': leave it out"):
        testing.assert_no_float_copy(dequantized, q, X, platform="cuda")


def test_same_integers():
    def rescaled(w, x):
        return two_layers(INT8, w, 2 * x)

    def other(w, x):
        return two_layers(INT8, w, x + 0.1)

    def once(w, x):
        return INT8(x, w, MATMUL)

    def plain(w, x):
        return two_layers(INT8, w, x)

    # A power of two changes scales only.
    testing.assert_same_integers(plain, rescaled, W, X)
    with pytest.raises(AssertionError, match="contraction 0, first, sums other"):
        testing.assert_same_integers(plain, other, W, X)
    with pytest.raises(AssertionError, match="has 2 quantized .* the second 1"):
        testing.assert_same_integers(plain, once, W, X)
    with pytest.raises(AssertionError, match=r"int32\[16,32\] in the first"):
        testing.assert_same_integers(once, lambda w, x: once(w, x[:8]), W, X)
    with pytest.raises(ValueError, match="no quantized contraction"):
        testing.assert_same_integers(jnp.matmul, plain, W, W)
    looped = jax.jit(lambda w, x: jax.lax.map(lambda x: once(w, x[None]), x))
    with pytest.raises(ValueError, match="1 of 1 .* in loops"):
        testing.assert_same_integers(looped, plain, W, X)
