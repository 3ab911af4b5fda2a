"""Barriers that keep programs alike."""

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.lowering import exact
from tests.common import normal


def num_kernels(function):
    text = jax.jit(function).lower(normal((8, 64))).compile().as_text()
    return text[text.index("ENTRY") :].count(" fusion(")


def test_a_fusion_barrier_is_a_kernel_of_its_own():
    assert num_kernels(lambda x: x * 3 + 1) == 1
    assert num_kernels(lambda x: exact.fusion_barrier(x * 3) + 1) == 2


def test_the_kernel_of_a_scales_barrier_finds_the_reciprocal():
    def quantized(x):
        scale = jnp.max(jnp.abs(x), axis=0, keepdims=True) * 0.5
        reciprocal = exact.reciprocal_at_barrier(scale, 2.0)
        return x * reciprocal, exact.scale_barrier(scale, 2.0)

    def plain(x):
        scale = jnp.max(jnp.abs(x), axis=0, keepdims=True) * 0.5
        return x * exact.reciprocal(scale, 2.0), exact.fusion_barrier(scale)

    assert num_kernels(quantized) == num_kernels(plain) - 1
    x = normal((8, 64))
    for one, other in zip(quantized(x), plain(x), strict=True):
        np.testing.assert_array_equal(one, other)
