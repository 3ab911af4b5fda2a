"""Linen models quantized by rules: as with injected contractions, bit for bit."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

from aqtlite import Rule, config
from aqtlite.flax import (
    AqtConvGeneralDilated,
    AqtDotGeneral,
    calibrate,
    convert,
    quantize_model,
)
from aqtlite.program.serving.placeholder import without_markers
from aqtlite.quantization.states.fixed_scale import FixedScale
from tests.common import normal, quick_jit
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

INT8 = config.fully_quantized()


class Block(nn.Module):
    """Attention and an MLP; `dot_general` is what its dense layers take."""

    dot_general: AqtDotGeneral | None = None

    @nn.compact
    def __call__(self, x, _=None):
        given = {} if self.dot_general is None else {"dot_general": self.dot_general}
        h = nn.LayerNorm()(x)
        attention = {
            f"{name}_dot_general": self.dot_general
            for name in ("qkv", "out")
            if self.dot_general is not None
        }
        x = x + nn.MultiHeadDotProductAttention(2, **attention)(h, h)
        h = nn.Dense(16, name="up", **given)(nn.LayerNorm()(x))
        return x + nn.Dense(8, name="down", **given)(nn.gelu(h)), None


class Model(nn.Module):
    """Embedding, blocks in a scan or not, and a tied head."""

    is_scanned: bool = False
    dot_general: AqtDotGeneral | None = None

    @nn.compact
    def __call__(self, tokens, train=False):
        embed = nn.Embed(11, 8, name="embed")
        x = embed(tokens)
        if self.is_scanned:
            axes = {"params": 0, "aqt": 0, "aqt_stats": 0}
            blocks = nn.scan(
                nn.remat(Block),
                variable_axes=axes,
                split_rngs={"params": True},
                length=2,
            )
            x, _ = blocks(self.dot_general, name="blocks")(x, None)
        else:
            x, _ = Block(self.dot_general, name="block")(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return embed.attend(x)


TOKENS = jnp.arange(6).reshape(2, 3)
DENSE = Rule(path=".*/(query|key|value|out|up|down)", cfg=INT8)


scanned_or_not = pytest.mark.parametrize(
    "is_scanned", [False, pytest.param(True, marks=pytest.mark.slow)]
)


@functools.cache
def variables_of(is_scanned: bool):
    return init(Model(is_scanned), TOKENS)


@scanned_or_not
def test_equals_injected_contractions(is_scanned):
    variables = variables_of(is_scanned)
    injected = Model(is_scanned, AqtDotGeneral(INT8))
    quantized = quantize_model(Model(is_scanned), [DENSE])

    @functools.partial(jax.jit, static_argnums=0)
    def step(model, variables):
        def loss(variables):
            return (model.apply(variables, TOKENS) ** 2).sum()

        return jax.value_and_grad(loss)(variables)

    wanted, found = step(injected, variables), step(quantized, variables)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    served = convert(injected, variables, TOKENS)
    serving = convert(quantized, variables, TOKENS)
    assert _arrays(serving) == _arrays(served)
    np.testing.assert_array_equal(
        jax.jit(quantized.apply)(serving, TOKENS),
        jax.jit(injected.apply)(served, TOKENS),
    )


class Experts(nn.Module):
    """Layers under `nn.vmap`, and one that is called twice."""

    dot_general: AqtDotGeneral | None = None

    @nn.compact
    def __call__(self, x):
        given = {} if self.dot_general is None else {"dot_general": self.dot_general}
        experts = nn.vmap(
            nn.Dense,
            in_axes=None,
            axis_size=3,
            variable_axes={"params": 0, "aqt": 0},
            split_rngs={"params": True},
        )
        x = experts(8, name="experts", **given)(x).mean(0)
        shared = nn.Dense(8, name="shared", **given)
        return shared(nn.relu(shared(x)))


def test_mapped_layers_and_layers_called_twice_equal_injected_ones():
    # Of mapped layers, injected ones round gradients with noise of their own.
    cfg = config.fully_quantized(use_stochastic_rounding=False)
    injected = Experts(AqtDotGeneral(cfg))
    quantized = quantize_model(Experts(), cfg, strict=True)
    x = normal((4, 8), 1)
    variables = init(Experts(), x)
    paths = [one.path for one in quantized.plan(variables, x).quantized()]
    assert paths == ["Experts/experts", "Experts/shared", "Experts/shared#1"]
    served = [convert(model, variables, x) for model in (injected, quantized)]
    assert len(jax.tree.leaves(served[1]["aqt"]["shared"])) == 2  # Frozen once.

    @jax.jit
    def both(variables, served):
        def of(model, variables, served):
            out, pull_back = jax.vjp(lambda v: model.apply(v, x), variables)
            return out, pull_back(jnp.sin(out)), model.apply(served, x)

        return [
            of(model, variables, one)
            for model, one in zip((injected, quantized), served, strict=True)
        ]

    wanted, got = both(variables, served)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    np.testing.assert_array_equal(got[2], got[0])
    assert _arrays(served[1]) == _arrays(served[0])


def _arrays(serving):
    """Paths and values of the arrays of serving variables, without markers."""
    flat = jax.tree_util.tree_flatten_with_path(without_markers(serving))[0]
    return {jax.tree_util.keystr(path): np.asarray(x).tolist() for path, x in flat}


@pytest.mark.slow
@pytest.mark.code("users")
@scanned_or_not
def test_every_contraction_trains_and_serves(is_scanned):
    quantized = quantize_model(Model(is_scanned), INT8, strict=True)
    variables = variables_of(is_scanned)
    assert not quantized.plan(variables, TOKENS).left_float()
    serving = convert(quantized, variables, TOKENS)
    assert "embedding" in serving["params"]["embed"]  # The lookup reads it.
    apply = jax.jit(quantized.apply)
    np.testing.assert_array_equal(apply(serving, TOKENS), apply(variables, TOKENS))
    np.testing.assert_array_equal(
        apply(serving, TOKENS[:, :2]), apply(variables, TOKENS[:, :2])
    )


def test_a_model_may_have_injected_contractions_too():
    class Both(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8, name="own", dot_general=AqtDotGeneral(config.w4a8()))(x)
            return nn.Dense(4, name="other")(x)

    quantized, x = quantize_model(Both(), INT8), jnp.ones((2, 8))
    variables = init(quantized, x)
    assert [one.path for one in quantized.plan(variables, x).quantized()] == [
        "Both/other"
    ]
    serving = convert(quantized, variables, x)
    assert serving["aqt"]["own"]["kernel"]["rhs"].numerics.bits == 4
    assert serving["aqt"]["other"]["kernel"]["rhs"].numerics.bits == 8
    np.testing.assert_array_equal(
        quantized.apply(serving, x), quantized.apply(variables, x)
    )


def test_mutable_collections_methods_and_rngs():
    class Net(nn.Module):
        def setup(self):
            self.conv = nn.Conv(4, (3, 3))
            self.norm = nn.BatchNorm(momentum=0.5)
            self.dense = nn.Dense(2)

        def features(self, x, train):
            x = self.norm(self.conv(x), use_running_average=not train)
            return nn.relu(x).mean((1, 2))

        def __call__(self, x, train=False):
            return self.dense(self.features(x, train))

    model = Net()
    quantized, x = quantize_model(model, INT8), jnp.ones((2, 5, 5, 3))
    variables = init(quantized, x)
    train = functools.partial(quantized.apply, train=True, mutable=["batch_stats"])
    out, changed = jax.eval_shape(train, variables, x)
    assert out.shape == (2, 2)
    assert list(changed) == ["batch_stats"]
    features = functools.partial(quantized.apply, train=False, method="features")
    assert jax.eval_shape(features, variables, x).shape == (2, 4)
    serving, apply = convert(quantized, variables, x), jax.jit(quantized.apply)
    np.testing.assert_array_equal(apply(serving, x), apply(variables, x))


class EncoderDecoder(nn.Module):
    """Methods that call methods, and an embedding that attends."""

    dot_general: AqtDotGeneral | None = None

    def setup(self):
        given = {} if self.dot_general is None else {"dot_general": self.dot_general}
        self.encoder = nn.Dense(8, **given)
        self.decoder = nn.Dense(8, **given)

    def encode(self, x):
        return self.encoder(x)

    def decode(self, x):
        return self.decoder(x)

    def __call__(self, x):
        return self.decode(jnp.tanh(self.encode(x)))


def test_one_conversion_serves_methods_that_the_call_calls():
    x = normal((2, 8), 1)
    quantized = quantize_model(EncoderDecoder(), INT8)
    variables = init(quantized, x)
    serving = convert(quantized, variables, x)
    served = convert(EncoderDecoder(AqtDotGeneral(INT8)), variables, x)
    assert _arrays(serving) == _arrays(served)

    @jax.jit
    def methods(variables):
        call = functools.partial(quantized.apply, variables, x)
        return call(), call(method="encode"), call(method="decode")

    jax.tree.map(np.testing.assert_array_equal, methods(serving), methods(variables))


@pytest.mark.parametrize("cfg", [INT8, config.static_int8()], ids=["int8", "static"])
def test_init_makes_caches_anew(cfg):
    """In a call that finds a cache, attention takes a token at a time."""
    attention = nn.MultiHeadDotProductAttention(num_heads=1, decode=True)
    quantized, x = quantize_model(attention, cfg), jnp.ones((1, 3, 4))
    variables = quick_jit(quantized.init)(jax.random.key(0), x)
    expected = quick_jit(attention.init)(jax.random.key(0), x)
    assert set(variables) - {"aqt_stats"} == {"params", "cache"}
    kept = {name: variables[name] for name in expected}
    jax.tree.map(np.testing.assert_array_equal, kept, dict(expected))


def test_dropout_draws_from_the_rngs_of_the_call():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dropout(0.5, deterministic=False)(nn.Dense(8)(x))

    quantized, x = quantize_model(Net(), INT8), jnp.ones((2, 4))
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = quick_jit(quantized.init)(keys, x)
    apply = jax.jit(lambda key: quantized.apply(variables, x, rngs={"dropout": key}))
    first, again, other = (apply(jax.random.key(i)) for i in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.slow
@scanned_or_not
def test_static_ranges_are_gathered_and_served(is_scanned):
    rules = [Rule(operands="weight", cfg=config.static_int8())]
    quantized = quantize_model(Model(is_scanned), rules)
    variables = init(quantized, TOKENS)
    with pytest.raises(ValueError, match="no statistics yet|aqtlite.flax.calibrate"):
        quantized.apply(variables, TOKENS)
    variables = calibrate(quantized, variables, [TOKENS, TOKENS + 1])
    apply = jax.jit(quantized.apply)
    gather = jax.jit(functools.partial(quantized.apply, mutable=["aqt_stats"]))
    _, changed = gather(variables, TOKENS)
    up = changed["aqt_stats"]["blocks" if is_scanned else "block"]["up"]
    batches = up["dot_general_abc_cd"]["lhs"].batches
    assert np.unique(batches).tolist() == [3]
    serving = convert(quantized, variables, TOKENS)
    layers = serving["aqt_stats"]["blocks" if is_scanned else "block"]
    assert isinstance(layers["up"]["dot_general_abc_cd"]["lhs"], FixedScale)
    np.testing.assert_array_equal(apply(serving, TOKENS), apply(variables, TOKENS))


def test_learned_scales_are_parameters_of_a_train_state():
    quantized = quantize_model(
        Model(), [Rule(path=".*/(up|down)", cfg=config.lsq(bits=8))]
    )
    variables = quick_jit(quantized.init)(jax.random.key(0), TOKENS)
    names = set(variables["params"]["block"]["up"])
    assert "aqt_dot_general_abc_cd" in names
    state = TrainState.create(
        apply_fn=quantized.apply, params=variables["params"], tx=optax.sgd(0.1)
    )

    @jax.jit
    def step(state):
        def loss(params):
            return (state.apply_fn({"params": params}, TOKENS) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(state.params)
        return value, state.apply_gradients(grads=gradients)

    before = state.params["block"]["up"]["aqt_dot_general_abc_cd"]
    first, state = step(state)
    after = state.params["block"]["up"]["aqt_dot_general_abc_cd"]
    assert any(
        (a != b).any()
        for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    )
    assert step(state)[0] < first


def test_convolutions_equal_injected_ones():
    x = normal((2, 6, 6, 3), 1)
    layer = nn.Conv(4, (3, 3), strides=2)
    injected = nn.Conv(
        4, (3, 3), strides=2, conv_general_dilated=AqtConvGeneralDilated(INT8)
    )
    variables = init(layer, x)
    np.testing.assert_array_equal(
        jax.jit(quantize_model(layer, INT8).apply)(variables, x),
        jax.jit(injected.apply)(variables, x),
    )


def test_refuses_what_is_no_model_and_explains_what_it_lacks():
    with pytest.raises(TypeError, match="aqtlite.quantize_function"):
        quantize_model(lambda x: x, INT8)
    with pytest.raises(TypeError, match="the model is quantized already"):
        quantize_model(quantize_model(Model(), INT8), INT8)
    quantized = quantize_model(Model(), INT8)
    assert quantized.is_scanned is False
    with pytest.raises(AttributeError, match="has no 'bind'"):
        quantized.bind({})
    with pytest.raises(ValueError, match="matches nothing"):
        quantize_model(Model(), [Rule(path="head", cfg=INT8)]).apply(
            variables_of(False), TOKENS
        )


def test_all_that_a_served_call_changes_is_returned():
    """But for parameters, which are frozen."""
    model = quantize_model(nn.Dense(4), config.fully_quantized())
    x = jnp.ones((2, 8))
    serving = convert(model, init(model, x), x)
    out, changed = model.apply(serving, x, mutable=True)
    assert np.isfinite(out).all()
    assert "params" not in changed


def test_a_quantized_model_is_no_module():
    model = quantize_model(nn.Dense(3), config.fully_quantized())
    with pytest.raises(TypeError, match="a quantized model is no module"):
        model(jnp.ones((2, 4)))


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        ("int8", "got 'int8'"),
        (config.fully_quantized, "got the function 'fully_quantized': call it"),
        ([config.fully_quantized()], "got a list of ['DotGeneral']"),
    ],
)
def test_what_is_neither_a_config_nor_rules(rules, named):
    with pytest.raises(TypeError, match=re.escape(named)) as raised:
        quantize_model(nn.Dense(3), rules)
    assert "rules must be a config.DotGeneral" in str(raised.value)
