"""Functions that are injected into NNX layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aqtlite import Rule, config
from aqtlite.flax.nnx import (
    AqtConvGeneralDilated,
    AqtDotGeneral,
    AqtEinsum,
    AqtEmbed,
    convert,
    init_state,
    plan,
    quantize_model,
)
from tests.common import normal
from tests.flax.nnx.models import CFG, Mlp, X, call

pytestmark = pytest.mark.code("quick")

DOT_GENERAL = AqtDotGeneral(CFG)


class Layers(nnx.Module):
    """Every layer that takes a function."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 16, dot_general=DOT_GENERAL, rngs=rngs)
        dot_general_cls = functools.partial(AqtDotGeneral, CFG)
        self.general = nnx.LinearGeneral(
            16, (2, 8), dot_general_cls=dot_general_cls, rngs=rngs
        )
        self.einsum = nnx.Einsum(
            "bhd,hdn->bn", (2, 8, 8), einsum_op=AqtEinsum(CFG), rngs=rngs
        )
        convolve = AqtConvGeneralDilated(CFG)
        self.conv = nnx.Conv(2, 4, (3,), conv_general_dilated=convolve, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            2,
            4,
            qkv_dot_general=DOT_GENERAL,
            out_dot_general=DOT_GENERAL,
            decode=False,
            rngs=rngs,
        )
        self.embed = AqtEmbed(16, 4, dot_general=DOT_GENERAL, rngs=rngs)

    def __call__(self, x):
        x = self.einsum(nnx.relu(self.general(nnx.relu(self.linear(x)))))
        return self.embed.attend(self.attention(self.conv(x.reshape(-1, 4, 2))))


@pytest.fixture(scope="module")
def layers():
    return Layers(nnx.Rngs(0))


def test_all_layers_are_planned_and_served(layers):
    planned = plan(quantize_model(layers), X)
    assert len(planned.quantized()) == 9
    assert all(one.is_injected for one in planned.quantized())
    assert "injected" in str(planned)
    serving = convert(layers, X, strict=True)
    params = jax.tree.leaves(nnx.state(serving, nnx.Param))
    assert max(x.ndim for x in params) == 2  # biases of attention
    expected = call(layers, X)
    np.testing.assert_array_equal(call(serving, X), expected)
    np.testing.assert_array_equal(call(quantize_model(layers), X), expected)


def test_injected_ones_win_over_rules():
    model = Mlp(nnx.Rngs(0), dot_general=AqtDotGeneral(config.weight_only(4)))
    planned = plan(quantize_model(model, [Rule(cfg=CFG, is_required=False)]), X)
    assert {one.cfg for one in planned.contractions} == {config.weight_only(4)}


def test_gradients_are_those_of_a_rule():
    injected = Mlp(nnx.Rngs(0), dot_general=DOT_GENERAL)
    gradients = nnx.jit(nnx.grad(lambda model: model(X).sum()))
    expected = gradients(quantize_model(Mlp(nnx.Rngs(0)), CFG))
    jax.tree.map(np.testing.assert_array_equal, gradients(injected), expected)


def test_a_jitted_function_is_traced_anew_inside_of_a_quantized_model():
    """In a model it contracts floats, which the config replaces."""
    double = jax.jit(lambda x, w: DOT_GENERAL(x, w, (((1,), (0,)), ((), ()))))

    class Model(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(normal((8, 4), 1))

        def __call__(self, x):
            return double(x, self.kernel[...])

    model = Model()
    outside = model(X)
    assert len(plan(model, X).quantized()) == 1
    np.testing.assert_array_equal(call(convert(model, X), X), outside)
    assert (double(X, model.kernel[...]) != X @ model.kernel[...]).any()


class Mapped(nnx.Module):
    """Three layers that run at once, and one that sees each row by itself."""

    def __init__(self, cfg):
        self.kernels = nnx.Param(
            normal((3, 8, 8), 1) * jnp.array([1, 9, 99]).reshape(3, 1, 1)
        )
        self.kernel = nnx.Param(normal((8, 8), 2))
        self.dot_general = AqtDotGeneral(cfg)

    def __call__(self, x):
        def contract(x, w):
            return self.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())))

        x = jax.vmap(contract, (None, 0))(x, self.kernels[...]).mean(0)
        return jax.vmap(contract, (0, None))(x, self.kernel[...])


def test_mapped_ones_have_scales_of_their_own():
    """In a quantized model as where they quantize by themselves."""
    cfg = config.fully_quantized(use_stochastic_rounding=False)
    cfg = config.update(cfg, {"fwd.*.calib_shared_axes": "per_tensor"})
    model = Mapped(cfg)
    serving = convert(model, X, strict=True)

    @nnx.jit
    def run(model, quantized, serving):
        gradients = (nnx.grad(lambda one: one(X).sum())(x) for x in (model, quantized))
        return model(X), quantized(X), serving(X), *gradients

    quantized = quantize_model(model)
    wanted, trained, served, *gradients = run(model, quantized, serving)
    np.testing.assert_array_equal(trained, wanted)
    np.testing.assert_array_equal(served, wanted)
    jax.tree.map(np.testing.assert_array_equal, *map(jax.tree.leaves, gradients))
    scales = [x.shape for x in jax.tree.leaves(nnx.state(serving)) if x.size == 3]
    assert scales == [(3, 1, 1)]


def test_a_model_that_differentiates_injected_ones_itself_is_refused():
    class Force(Mlp):
        def __call__(self, x):
            return jax.grad(lambda x: super(Force, self).__call__(x).sum())(x)

    with pytest.raises(
        ValueError, match="quantize the function that is differentiated"
    ):
        call(quantize_model(Force(nnx.Rngs(0), dot_general=DOT_GENERAL)), X)


def test_without_a_config_it_is_the_float_layer():
    layer = nnx.Linear(8, 4, dot_general=AqtDotGeneral(None), rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer(X), nnx.Linear(8, 4, rngs=nnx.Rngs(0))(X))


def test_what_has_a_state_needs_a_model():
    layer = nnx.Linear(8, 4, dot_general=AqtDotGeneral(config.lsq(8)), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="quantize_model"):
        layer(X)
    model = quantize_model(layer)
    init_state(model, X)
    assert model(X).shape == (4, 4)


@pytest.mark.parametrize(
    ("cfg", "error"),
    [
        ("int8", TypeError),
        (config.update(CFG, {"out": CFG.fwd.lhs}), ValueError),
    ],
)
def test_wrong_configs(cfg, error):
    with pytest.raises(error, match="AqtDotGeneral"):
        AqtDotGeneral(cfg)


@pytest.mark.parametrize(
    ("dot_general", "words"),
    [
        (AqtDotGeneral, "the class AqtDotGeneral was called with arrays"),
        (CFG, "a config.DotGeneral was called as a function"),
    ],
)
def test_one_thing_for_another_in_a_layer(dot_general, words):
    layer = nnx.Linear(8, 4, dot_general=dot_general, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=words):
        layer(X)


@pytest.mark.parametrize(
    ("dot_general", "words"),
    [
        (AqtConvGeneralDilated(CFG), "AqtConvGeneralDilated.*padding"),
        (AqtEinsum(CFG), "AqtEinsum takes an equation"),
    ],
)
def test_the_function_of_another_operation_in_a_layer(dot_general, words):
    layer = nnx.Linear(8, 4, dot_general=dot_general, rngs=nnx.Rngs(0))
    places = r"AqtConvGeneralDilated\(cfg\) as conv_general_dilated="
    with pytest.raises(TypeError, match=f"{words}.*{places}"):
        layer(X)
    conv = nnx.Conv(
        8, 4, (3,), conv_general_dilated=AqtDotGeneral(CFG), rngs=nnx.Rngs(0)
    )
    with pytest.raises(TypeError, match=f"AqtDotGeneral.*another function.*{places}"):
        conv(X[None])


def test_embeddings_look_up_floats(layers):
    rows = layers.embed(jnp.array([2, 0]))
    np.testing.assert_array_equal(rows, layers.embed.embedding[...][jnp.array([2, 0])])
