"""Attention of Flax with its einsums quantized by the hooks that it has for them."""

import functools
import re

import jax
import pytest
from flax import linen as nn

from aqtlite.flax import AqtEinsum
from tests.common import nearest, rms_error
from tests.flax.support import DG, XX, init

pytestmark = pytest.mark.code("quick")

EINSUM = functools.partial(AqtEinsum, nearest())


def attention(einsum, dot_general):
    return nn.MultiHeadDotProductAttention(
        num_heads=2,
        use_bias=False,  # Of keys it has no gradient.
        qkv_dot_general=dot_general,
        out_dot_general=dot_general,
        qk_attn_weights_einsum_cls=einsum,
        attn_weights_value_einsum_cls=einsum,
    )


def step(model):
    def loss(variables, x):
        out = model.apply(variables, x)
        return (out**2).sum(), out

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))


def test_values_and_gradients():
    model = attention(EINSUM, DG)
    variables = init(model, XX)
    lowered = step(model).lower(variables, XX)
    # Six contractions, and both gradients of each.
    dots = re.findall(r"stablehlo\.dot_general.*-> tensor<.*x(\w+)>", lowered.as_text())
    assert set(dots) == {"i32"}
    got = lowered.compile()(variables, XX)
    wanted = step(attention(None, None))(variables, XX)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert rms_error(one, other) < 0.08
