"""`AqtEinsum` of three operands in modules: served is what was trained."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from aqtlite import config
from aqtlite.flax import AqtEinsum, convert
from aqtlite.flax import nnx as aqt_nnx
from aqtlite.testing import assert_served_equals_trained
from tests.common import mostly_slow, nearest, normal, rms_error
from tests.flax.support import apply
from tests.replacing import assert_bits

pytestmark = pytest.mark.code("quick")

# The activations are contracted first, or both weights with each other.
SHAPES = {"first": ((16, 8), (8, 2), (2, 8)), "weights": ((64, 4), (4, 16), (16, 4))}
CONFIGS = {
    "int8": nearest(),
    "static": config.static_int8(),
    "lsq": config.lsq(4),
    "smoothquant": config.smoothquant(),
    "weights": config.weight_only(4),
}
EQUATION = "nd,dr,rk->nk"


class Layer(nn.Module):
    cfg: config.DotGeneral
    shapes: tuple

    @nn.compact
    def __call__(self, x):
        first, second = (
            self.param(name, nn.initializers.normal(1.0), shape)
            for name, shape in zip("ab", self.shapes[1:], strict=True)
        )
        return AqtEinsum(self.cfg)(EQUATION, x, first, second)


class NnxLayer(nnx.Module):
    def __init__(self, cfg, shapes):
        self.einsum = aqt_nnx.AqtEinsum(cfg)
        self.a, self.b = (nnx.Param(normal(s, i)) for i, s in enumerate(shapes[1:], 1))

    def __call__(self, x):
        return self.einsum(EQUATION, x, self.a[...], self.b[...])


CASES = [f"{order} {name}" for order in SHAPES for name in CONFIGS]


@pytest.mark.parametrize("case", mostly_slow(CASES, "first static", "weights int8"))
def test_linen(case):
    order, name = case.split()
    x = normal(SHAPES[order][0])
    model = Layer(CONFIGS[name], SHAPES[order])
    variables = jax.jit(model.init)(jax.random.key(0), x)
    if "aqt_stats" in variables:
        _, after = apply(model, variables, x, mutable=["aqt_stats"])
        variables = {**variables, **after}
        assert len(variables["aqt_stats"]) == 2
    serving = convert(model, variables, x)
    assert_served_equals_trained(model, variables, x, serving=serving)
    assert len(serving["aqt"]) == (2 if order == "first" else 1)


def test_gradients():
    x = normal(SHAPES["first"][0])
    model = Layer(nearest(), SHAPES["first"])
    params = dict(zip("ab", map(normal, SHAPES["first"][1:]), strict=True))

    def loss(params, evaluate):
        return (evaluate(params) ** 2).mean()

    def in_float(params):
        return jnp.einsum(EQUATION, x, params["a"], params["b"])

    def quantized(params):
        return model.apply({"params": params}, x)

    gradients = jax.jit(jax.grad(loss), static_argnums=1)
    found, wanted = gradients(params, quantized), gradients(params, in_float)
    for one in "ab":
        assert rms_error(found[one], wanted[one]) < 0.05


def test_a_name_is_of_all_contractions():
    class Named(nn.Module):
        @nn.compact
        def __call__(self, x):
            a, b = (
                self.param(name, nn.initializers.normal(1.0), (8, 8)) for name in "ab"
            )
            einsum = AqtEinsum(config.static_int8(), name="pair")
            return einsum("nd,dr,rk->nk", x, a, b)

    variables = jax.eval_shape(Named().init, jax.random.key(0), normal((4, 8)))
    assert sorted(variables["aqt_stats"]) == ["pair", "pair_1"]


@pytest.mark.parametrize("order", SHAPES)
def test_nnx(order):
    x = normal(SHAPES[order][0])
    model = aqt_nnx.quantize_model(NnxLayer(nearest(), SHAPES[order]), ())
    plan = aqt_nnx.plan(model, x)
    assert plan.summary() == "2 contractions: 2 quantized, 0 in float"
    wanted = nnx.jit(lambda model, x: model(x))(model, x)
    serving = aqt_nnx.convert(model, x)
    assert_bits(nnx.jit(lambda model, x: model(x))(serving, x), wanted)


def test_an_operand_that_was_not_restored():
    with pytest.raises(TypeError, match="operand 1 is None"):
        AqtEinsum(nearest())("ab,bc,cd->ad", jnp.ones((2, 2)), None, jnp.ones((2, 2)))
