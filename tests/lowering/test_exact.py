"""Barriers that keep programs alike."""

import jax

from aqtlite.lowering import exact
from tests.common import normal


def num_kernels(function):
    text = jax.jit(function).lower(normal((8, 64))).compile().as_text()
    return text[text.index("ENTRY") :].count(" fusion(")


def test_a_fusion_barrier_is_a_kernel_of_its_own():
    assert num_kernels(lambda x: x * 3 + 1) == 1
    assert num_kernels(lambda x: exact.fusion_barrier(x * 3) + 1) == 2
