"""Adapters of NNX models by rules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import aqtlite
from aqtlite import Rule, config
from aqtlite.flax.nnx import convert, init_state, merge_adapters, quantize_model
from tests.common import normal, relative_error

pytestmark = pytest.mark.code("quick")

X = normal((8, 16))
RULE = Rule(cfg=config.weight_only(8), adapter=config.Lora(2, 4, dropout=0.1))


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 8, rngs=rngs)
        self.down = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def model_of(rule=RULE):
    return quantize_model(Mlp(nnx.Rngs(0)), [rule])


@nnx.jit
def run(model):
    return model(X)


@nnx.jit
def train_step(model, optimizer):
    def loss_fn(model):
        return jnp.mean((model(X) - 1) ** 2)

    at = nnx.DiffState(0, nnx.LoRAParam)
    loss, gradients = nnx.value_and_grad(loss_fn, argnums=at)(model)
    optimizer.update(model, gradients)
    return loss


def test_merged_weights_are_not_rotated():
    cfg = config.update(RULE.cfg, {"fwd.rotation": config.Hadamard()})
    model = model_of(Rule(cfg=cfg, adapter=config.Lora(2, 4)))
    init_state(model, X)
    for one in (model, convert(model, X)):
        merged = merge_adapters(one, X)
        with_merged = Mlp(nnx.Rngs(0))
        nnx.update(with_merged, nnx.state(merged, nnx.Param))
        assert relative_error(with_merged(X), one(X)) < 1e-5


def test_adapters_beside_learned_scales():
    plain = quantize_model(Mlp(nnx.Rngs(0)), config.lsq(8))
    model = model_of(Rule(cfg=config.lsq(8), adapter=config.Lora(2, 4)))
    for one in (plain, model):
        init_state(one, X)
    np.testing.assert_array_equal(model(X), plain(X))
    serving = convert(model, X)
    np.testing.assert_array_equal(run(serving), run(model))


def test_adapters_of_a_converted_model_train():
    plain = quantize_model(Mlp(nnx.Rngs(0)), RULE.cfg)
    model = convert(model_of(), X)
    init_state(model, X)
    np.testing.assert_array_equal(run(model), run(plain))
    adapters = nnx.state(model, nnx.LoRAParam)
    assert len(jax.tree.leaves(adapters)) == 4
    optimizer = nnx.Optimizer(model, optax.adam(0.05), wrt=nnx.LoRAParam)
    model.train()
    losses = [float(train_step(model, optimizer)) for _ in range(15)]
    assert losses[-1] < losses[0] / 2
    model.eval()
    np.testing.assert_array_equal(run(model), run(model))
    merged = merge_adapters(model, X)
    assert not jax.tree.leaves(nnx.state(merged, nnx.LoRAParam))
    assert not aqtlite.is_frozen(merged.up.kernel)
    assert relative_error(run(merged), run(model)) < 0.02
    assert aqtlite.is_frozen(convert(merged, X).up.kernel)


def test_dropout_is_for_training():
    model = model_of()
    init_state(model, X)
    for variable in jax.tree.leaves(
        nnx.state(model, nnx.LoRAParam), is_leaf=lambda x: isinstance(x, nnx.Variable)
    ):
        variable[...] += 0.1
    model.train()
    assert jnp.any(run(model) != run(model))


def test_frozen_kernels_have_no_gradient():
    model = model_of()
    init_state(model, X)
    gradient = nnx.grad(lambda m: jnp.sum(m(X)))
    for one, function in ((model, gradient), (convert(model, X), nnx.jit(gradient))):
        with pytest.raises(TypeError, match="frozen"):
            function(one)


def test_adapters_have_the_names_of_the_axes_of_their_kernels():
    init = nnx.with_partitioning(nnx.initializers.ones, ("in", "out"))
    with nnx.use_eager_sharding(False):
        layer = nnx.Linear(16, 4, kernel_init=init, rngs=nnx.Rngs(0))
        model = quantize_model(layer, [RULE])
        for one in (model, convert(model, X)):
            init_state(one, X)
            specs = nnx.get_partition_spec(nnx.state(one, nnx.LoRAParam))
            found = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
            assert found == [P("in", None), P(None, "out")]


def test_a_layer_with_adapters_of_its_own():
    layer = nnx.LoRALinear(16, 4, lora_rank=2, rngs=nnx.Rngs(0))
    chosen = [Rule(parameter=".*lora_[ab]", cfg=None), Rule(cfg=config.weight_only(8))]
    serving = convert(quantize_model(layer, chosen), X)
    assert aqtlite.is_frozen(serving.kernel)
    assert not aqtlite.is_frozen(serving.lora.lora_a)


def test_errors():
    model = model_of()
    with pytest.raises(ValueError, match=r"has no parameters: make them .*init_state"):
        model(X)

    class Outer(nnx.Module):
        def __init__(self):
            self.inner = model

        def __call__(self, x):
            return self.inner(x)

    with pytest.raises(ValueError, match="quantize the outermost model"):
        quantize_model(Outer())(X)
    with pytest.raises(TypeError, match="merge_adapters takes what"):
        merge_adapters(Mlp(nnx.Rngs(0)), X)
