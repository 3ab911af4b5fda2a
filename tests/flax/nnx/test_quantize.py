"""NNX models quantized by rules: what they look like, and training."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from aqtlite import Rule, config
from aqtlite.flax.nnx import plan, quantize_model
from tests.flax.nnx.models import (
    CFG,
    TOKENS,
    Mlp,
    Scanned,
    Transformer,
    X,
    call,
    values,
)

pytestmark = pytest.mark.code("quick")

WEIGHTS = Rule(operands="weight", cfg=CFG)


@pytest.fixture(scope="module")
def transformer():
    return quantize_model(Transformer(nnx.Rngs(0)), [WEIGHTS])


def paths(contractions):
    return [one.path for one in contractions]


class TestPlan:
    def test_weights_have_the_paths_of_the_modules_that_hold_them(self, transformer):
        block = ["attention/query", "attention/key", "attention/value"]
        block += ["attention/out", "mlp"]
        expected = [f"blocks/{i}/{name}" for i in range(2) for name in block]
        quantized = plan(transformer, TOKENS).quantized()
        assert paths(quantized) == [*expected, "embed"]

    def test_activations_have_that_of_the_module_around(self, transformer):
        left = paths(plan(transformer, TOKENS).left_float())
        assert [path.rpartition("/")[0] for path in left] == [
            *["blocks/0/attention"] * 2,
            *["blocks/1/attention"] * 2,
        ]

    def test_rules_match_these_paths(self, transformer):
        rules = [
            Rule(path="blocks/1/attention/.*", operands="activations", cfg=CFG),
            Rule(path="blocks/0/mlp", cfg=config.weight_only()),
        ]
        planned = plan(quantize_model(transformer, rules), TOKENS)
        *attention, (mlp,) = [
            [one for one in planned.contractions if one.rule == i] for i in range(2)
        ]
        assert len(attention[0]) == 2
        assert mlp.path == "blocks/0/mlp"

    def test_takes_shapes_and_changes_nothing(self, transformer):
        before = values(transformer)
        tokens = jax.ShapeDtypeStruct(TOKENS.shape, TOKENS.dtype)
        assert paths(plan(transformer, tokens).contractions)
        jax.tree.map(np.testing.assert_array_equal, before, values(transformer))

    def test_a_module_with_several_parameters_numbers_them(self):
        layers = nnx.Sequential(nnx.LoRA(8, 2, 8, rngs=nnx.Rngs(0)))
        model = quantize_model(layers, CFG)
        assert paths(plan(model, X).quantized()) == ["layers/0", "layers/0#1"]

    def test_a_rule_that_matches_nothing_names_near_misses(self, transformer):
        model = quantize_model(transformer, Rule(path="block/0/mlp", cfg=CFG))
        with pytest.raises(ValueError, match="blocks/0/mlp"):
            plan(model, TOKENS)


class TestCalls:
    def test_left_in_float_it_is_the_model(self):
        """Batch statistics and rngs are those of the model, too."""
        one, other = Transformer(nnx.Rngs(1), 1), Transformer(nnx.Rngs(1), 1)
        quantized = quantize_model(other, Rule(cfg=None))
        for _ in range(2):
            np.testing.assert_array_equal(call(one, TOKENS), call(quantized, TOKENS))
        jax.tree.map(np.testing.assert_array_equal, values(one), values(other))
        assert one.blocks[0].norm.mean[...].any()
        assert one.blocks[0].dropout.rngs.count[...] == 2

    def test_mode_reaches_the_model(self, transformer):
        model = nnx.clone(transformer)
        model.eval()
        np.testing.assert_array_equal(call(model, TOKENS), call(model, TOKENS))
        assert model.blocks[0].norm.use_running_average

    def test_modules_among_the_arguments(self):
        class Noisy(nnx.Module):
            def __init__(self, rngs):
                self.linear = nnx.Linear(8, 8, rngs=rngs)

            def __call__(self, x, *, rngs):
                return self.linear(x) + rngs.noise.normal(x.shape)

        model, rngs = quantize_model(Noisy(nnx.Rngs(0)), CFG), nnx.Rngs(noise=1)
        assert (model(X, rngs=rngs) != model(X, rngs=rngs)).all()
        assert rngs.noise.count[...] == 2

    def test_inside_jax_jit(self):
        model = quantize_model(Mlp(nnx.Rngs(0)), CFG)
        expected = call(model, X)
        np.testing.assert_array_equal(jax.jit(lambda x: model(x))(X), expected)
        np.testing.assert_array_equal(jax.jit(lambda m, x: m(x))(model, X), expected)

    def test_intermediates_are_captured(self, transformer):
        model = quantize_model(transformer.blocks[0].attention, [WEIGHTS])
        run = nnx.capture(model, nnx.Intermediate)
        _, sown = run(jnp.ones((1, 4, 8)), sow_weights=True)
        ((weights,),) = jax.tree.leaves(sown, is_leaf=lambda x: isinstance(x, tuple))
        assert weights.shape == (1, 2, 4, 4)


class TestTraining:
    def test_a_step_lowers_the_loss(self):
        model = quantize_model(Mlp(nnx.Rngs(0)), CFG)
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            value, grads = nnx.value_and_grad(
                lambda model: jnp.mean((model(X) - 1) ** 2)
            )(model)
            optimizer.update(model, grads)
            return value

        losses = [float(step(model, optimizer)) for _ in range(4)]
        assert losses == sorted(losses, reverse=True)

    def test_ensembles(self):
        @nnx.vmap
        def ensemble(keys):
            return quantize_model(Mlp(nnx.Rngs(keys)), CFG)

        models = ensemble(jax.random.split(jax.random.key(0), 2))
        out = nnx.jit(nnx.vmap(lambda model, x: model(x), in_axes=(0, None)))(models, X)
        for i in range(2):
            one = quantize_model(Mlp(nnx.Rngs(0)), CFG)
            nnx.update(one, jax.tree.map(lambda x, i=i: x[i], nnx.state(models)))
            np.testing.assert_array_equal(out[i], call(one, X))

    def test_gradients_through_scans(self):
        model = quantize_model(Scanned(nnx.Rngs(0)), CFG)
        assert paths(plan(model, X).quantized()) == ["layers"]
        grads = nnx.jit(nnx.grad(lambda model: model(X).sum()))(model)
        kernel = grads["layers"]["kernel"][...]
        assert kernel.shape == (3, 8, 8)
        assert all(kernel[i].any() for i in range(3))


class TestRefusals:
    def test_what_is_no_module(self):
        with pytest.raises(TypeError, match="takes a flax.nnx.Module, got function"):
            quantize_model(lambda x: x, CFG)

    def test_what_are_no_rules(self):
        with pytest.raises(TypeError, match="sequence of aqtlite.Rule"):
            quantize_model(Mlp(nnx.Rngs(0)), "int8")

    def test_floats_that_no_rule_names_if_strict(self, transformer):
        model = quantize_model(transformer, [WEIGHTS], strict=True)
        with pytest.raises(ValueError, match="4 contractions stay in float"):
            model(TOKENS)
