"""Barriers that keep programs alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite.lowering import fusion
from tests.common import normal


def num_kernels(function):
    text = jax.jit(function).lower(normal((8, 64))).compile().as_text()
    return text[text.index("ENTRY") :].count(" fusion(")


def test_a_fusion_barrier_is_a_kernel_of_its_own():
    assert num_kernels(lambda x: x * 3 + 1) == 1
    assert num_kernels(lambda x: fusion.barrier(x * 3) + 1) == 2


def test_the_kernel_of_a_scales_barrier_finds_the_reciprocal():
    def quantized(x):
        scale = jnp.max(jnp.abs(x), axis=0, keepdims=True) * 0.5
        scale, reciprocal = fusion.behind_barrier(scale, 2.0)
        return x * reciprocal, scale

    def plain(x):
        scale = jnp.max(jnp.abs(x), axis=0, keepdims=True) * 0.5
        return x * fusion.reciprocal(scale, 2.0), fusion.barrier(scale)

    assert num_kernels(quantized) == num_kernels(plain) - 1
    x = normal((8, 64))
    for one, other in zip(quantized(x), plain(x), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("unit", [0.5, 1.0, 127.0])
def test_a_scale_behind_a_barrier_and_its_reciprocal_keep_their_bits(unit):
    largest, tiny = np.finfo(np.float32).max, np.finfo(np.float32).tiny
    ordinary = np.abs(normal((3, 9)).ravel())
    special = [0, 1e-45, tiny, 2.0**-63, 1, 2.0**126, largest, np.inf, np.nan, -np.nan]
    scale = jnp.asarray(np.array([*special, *ordinary], np.float32)[:, None])

    @jax.jit
    def bits(scale):
        both = fusion.behind_barrier(scale, unit)
        return jax.tree.map(lambda x: jax.lax.bitcast_convert_type(x, jnp.uint32), both)

    @jax.jit
    def plain(scale):
        both = scale, fusion.reciprocal(scale, unit)
        return jax.tree.map(lambda x: jax.lax.bitcast_convert_type(x, jnp.uint32), both)

    for found, wanted in zip(bits(scale), plain(scale), strict=True):
        np.testing.assert_array_equal(found, wanted)
