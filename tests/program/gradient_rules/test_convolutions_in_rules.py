"""Convolutions and ragged_dots in the rules of `jax.custom_vjp`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from aqtlite import Rule, quantize_function
from aqtlite.flax import nnx as aqt_nnx
from aqtlite.flax import quantize_model
from tests.common import mostly_slow, nearest, normal
from tests.program.gradient_rules.test_rule_gradients import (
    gradients_of,
    in_float,
    with_vjp,
)

pytestmark = pytest.mark.code("quick")

# Without reuse, the gradients of a contraction are those of its own rule.
INT8 = nearest(use_fwd_quant=False)
IMAGE, KERNEL = normal((2, 8, 8, 4)), normal((3, 3, 4, 6))
ROWS, EXPERTS, SIZES = normal((12, 8)), normal((3, 8, 6)), jnp.array([4, 0, 7])
NHWC = ("NHWC", "HWIO", "NHWC")


def conv(x, w, **kwargs):
    options = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": NHWC}
    return lax.conv_general_dilated(x, w, **(options | kwargs))


def by_jax(function):
    """A function with its own gradient as a rule."""
    return with_vjp(
        function,
        lambda *args: (function(*args), args),
        lambda r, g: vjp(function, r, g),
    )


def vjp(function, args, g):
    return jax.vjp(function, *args)[1](g)


def written_out(saved, g):
    x, w = saved
    dx = conv(g, jnp.flip(w, (0, 1)).swapaxes(2, 3))
    numbers = ("CHWN", "IHWO", "HWNC")
    return dx, conv(x, g, padding=((1, 1), (1, 1)), dimension_numbers=numbers)


def in_other_orders(saved, g):
    x, w = saved
    flipped = jnp.flip(w, (0, 1)).transpose(2, 3, 0, 1)
    g, x = (one.transpose(0, 3, 1, 2) for one in (g, x))
    dx = conv(g, flipped, dimension_numbers=("NCHW", "OIHW", "NHWC"))
    numbers = ("CNHW", "IOHW", "NCHW")
    dw = conv(x, g, padding=((1, 1), (1, 1)), dimension_numbers=numbers)
    return dx, dw.transpose(2, 3, 0, 1)


def upsampling(saved, g):
    dx = lax.conv_transpose(
        g, saved[1], (2, 2), "SAME", dimension_numbers=NHWC, transpose_kernel=True
    )
    return dx, vjp(strided, saved, g)[1]


def strided(x, w):
    return conv(x, w, window_strides=(2, 2))


def grouped(x, w):
    return conv(x, w[:, :, :2], window_strides=(2, 1), feature_group_count=2)


def batch_grouped(x, w):
    return conv(x, w, rhs_dilation=(2, 1), batch_group_count=2)


def pointwise(x, w):
    return conv(x, w[:1, :1])


def experts(x, w):
    return lax.ragged_dot(x, w, SIZES)


def two_after_each_other(x, w):
    return experts(jnp.tanh(experts(x, w)), w.swapaxes(1, 2))


def of_rows(x, g, contracting=0):
    dims = lax.RaggedDotDimensionNumbers(
        (((contracting,), (0,)), ((), ())), [contracting], []
    )
    return lax.ragged_dot_general(x, g, SIZES, dims)


def of_experts(saved, g):
    x, w = saved
    return lax.ragged_dot(g, w.swapaxes(1, 2), SIZES), of_rows(x, g)


def of_experts_in_other_orders(saved, g):
    x, w = saved
    return lax.ragged_dot(g, w.swapaxes(1, 2), SIZES), of_rows(g.T, x, 1).swapaxes(1, 2)


def ruled(function, rule):
    return with_vjp(function, lambda x, w: (function(x, w), (x, w)), rule)


CASES = {
    "convolution": (conv, ruled(conv, written_out), IMAGE, KERNEL),
    "in other orders": (conv, ruled(conv, in_other_orders), IMAGE, KERNEL),
    "conv_transpose": (strided, ruled(strided, upsampling), IMAGE, KERNEL),
    "grouped": (grouped, by_jax(grouped), IMAGE, KERNEL),
    "batch_grouped": (batch_grouped, by_jax(batch_grouped), IMAGE, KERNEL),
    "pointwise": (pointwise, by_jax(pointwise), IMAGE, KERNEL),
    "ragged_dot": (experts, ruled(experts, of_experts), ROWS, EXPERTS),
    "ragged_dot in other orders": (
        experts,
        ruled(experts, of_experts_in_other_orders),
        ROWS,
        EXPERTS,
    ),
    "two ragged_dots by jax.vjp": (
        two_after_each_other,
        by_jax(two_after_each_other),
        ROWS,
        EXPERTS,
    ),
}


@pytest.mark.parametrize(
    "case",
    mostly_slow(CASES, "in other orders", "ragged_dot in other orders"),
)
def test_they_are_the_gradients_of_the_contraction(case):
    function, with_rule, x, w = CASES[case]

    def gradients(function):
        quantized = quantize_function(
            lambda w, x: function(x, w), INT8, params=0, strict=True
        )
        return gradients_of(quantized)

    assert not in_float(gradients(with_rule), w, x)
    found, wanted = (jax.jit(gradients(one))(w, x) for one in (with_rule, function))
    for one, other in zip(found, wanted, strict=True):
        largest = float(jnp.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * largest)


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.normal(), KERNEL.shape)
        return CASES["convolution"][1](x, kernel)


class NnxLayer(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(KERNEL)

    def __call__(self, x):
        return CASES["convolution"][1](x, self.kernel[...])


def test_models_by_rules():
    model = quantize_model(LinenLayer(), INT8, strict=True)
    variables = {"params": {"kernel": KERNEL}}

    def loss(variables):
        return jnp.sin(model.apply(variables, IMAGE)).sum()

    assert not in_float(jax.grad(loss), variables)

    module = aqt_nnx.quantize_model(NnxLayer(), INT8, strict=True)
    graph, state = nnx.split(module)

    def nnx_loss(state):
        return jnp.sin(nnx.merge(graph, state)(IMAGE)).sum()

    assert not in_float(jax.grad(nnx_loss, allow_int=True), state)


UNRECOGNIZED = {
    "other padding": (
        ruled(
            conv,
            lambda r, g: (
                conv(
                    g, jnp.flip(r[1], (0, 1)).swapaxes(2, 3), padding=((2, 0), (1, 1))
                ),
                written_out(r, g)[1],
            ),
        ),
        IMAGE,
        KERNEL,
    ),
    "not reversed": (
        ruled(conv, lambda r, g: (conv(g, r[1].swapaxes(2, 3)), vjp(conv, r, g)[1])),
        IMAGE,
        KERNEL,
    ),
    "mapped": (jax.vmap(by_jax(conv), (0, None)), IMAGE[:, None], KERNEL),
    "another weight": (
        ruled(
            experts,
            lambda r, g: (of_experts((r[0], r[1] ** 2), g)[0], of_experts(r, g)[1]),
        ),
        ROWS,
        EXPERTS,
    ),
}


@pytest.mark.parametrize("case", mostly_slow(UNRECOGNIZED, "mapped"))
def test_what_is_not_recognized_is_in_the_plan(case):
    function, x, w = UNRECOGNIZED[case]
    quantized = quantize_function(lambda w, x: function(x, w), INT8, params=0)
    (left,) = quantized.plan(w, x).left_float()
    assert left.path == "gradient"
    assert "it is in the rule of a jax.custom_vjp" in left.why_float
    assert len(in_float(gradients_of(quantized), w, x)) == 1

    def strict(rules):
        return quantize_function(
            lambda w, x: function(x, w), rules, params=0, strict=True
        )

    with pytest.raises(ValueError, match="gradient: it is in the rule of a"):
        strict(INT8).plan(w, x)
    strict([Rule(path="gradient", cfg=None), Rule(cfg=INT8)]).plan(w, x)
