"""Adapters of Linen models by rules."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import Rule, config, numerics
from aqtlite.flax import (
    absorb_smoothing,
    adapters_of,
    calibrate,
    convert,
    merge_adapters,
    quantize_model,
    with_adapters,
)
from tests.common import normal, quick_jit, relative_error

pytestmark = pytest.mark.code("quick")

NF4 = config.update(
    config.weight_only(bits=4),
    {
        "fwd.rhs": config.Tensor(
            numerics=numerics.NormalFloat(), blocks=config.Blocks(size=8)
        )
    },
)
X = normal((2, 5, 16))


class Net(nn.Module):
    """Attention, scanned layers, and a head."""

    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, name="attention")(x, x)

        def layer(module, x, _):
            return nn.relu(module(x)), None

        axes = {"params": 0, "aqt": 0}
        scanned = nn.scan(
            nn.remat(layer), variable_axes=axes, split_rngs={"params": True}, length=3
        )
        x, _ = scanned(nn.Dense(16, name="layers"), x, None)
        return nn.Dense(4, name="head")(x)


MODEL = quantize_model(Net(), [Rule(cfg=NF4, adapter=config.Lora(2, 4, dropout=0.2))])
VARIABLES = quick_jit(Net().init)(jax.random.key(0), X)
APPLY = quick_jit(MODEL.apply)


@pytest.fixture(scope="module")
def base():
    return convert(MODEL, VARIABLES, X)


@pytest.fixture(scope="module")
def adapters(base):
    return MODEL.init_adapters(base, X)


def test_the_first_output_is_that_of_the_quantized_base(base, adapters):
    plain = quantize_model(Net(), [Rule(operands="weight", cfg=NF4)])
    wanted = quick_jit(plain.apply)(VARIABLES, X)
    for variables in (VARIABLES, base):
        out = APPLY(with_adapters(variables, adapters), X)
        np.testing.assert_array_equal(out, wanted)


def test_adapters_are_beside_the_modules_own_parameters(base, adapters):
    made = jax.eval_shape(MODEL.init, jax.random.key(0), X)
    in_init = jax.tree.map(jnp.shape, adapters_of(made))
    assert in_init == jax.tree.map(jnp.shape, adapters)
    (entry,) = set(made["params"]["head"]) - {"kernel", "bias"}
    head = made["params"]["head"][entry]["adapter"]
    assert {k: a.shape for k, a in head.items()} == {
        "lora_a": (16, 2),
        "lora_b": (2, 4),
    }
    shapes = {jnp.shape(a) for a in jax.tree.leaves(adapters["layers"])}
    assert shapes == {(3, 16, 2), (3, 2, 16)}
    out = {jnp.shape(a) for a in jax.tree.leaves(adapters["attention"]["out"])}
    assert out == {(2, 8, 2), (2, 16)}
    # Converted with adapters or without, it is the same base.
    reports = []
    whole = with_adapters(VARIABLES, adapters)
    again = convert(MODEL, whole, X, report=reports.append)
    assert "adapters (12)" in str(reports[0])
    out = APPLY(with_adapters(base, adapters), X)
    np.testing.assert_array_equal(APPLY(again, X), out)


@pytest.mark.slow
def test_adapters_train_and_nothing_else_does(base, adapters):
    wanted = jnp.tanh(X[..., :4])

    def loss(adapters, variables):
        out = MODEL.apply(with_adapters(variables, adapters), X)
        return jnp.mean((out - wanted) ** 2)

    run = quick_jit(jax.value_and_grad(loss))
    first, gradients = run(adapters, base)
    for _ in range(8):
        adapters = jax.tree.map(lambda a, g: a - 0.2 * g, adapters, gradients)
        last, gradients = run(adapters, base)
    assert last < 0.9 * first
    merged = merge_adapters(MODEL, with_adapters(base, adapters), X)
    assert jax.tree.structure(merged) == jax.tree.structure(VARIABLES)
    served = APPLY(with_adapters(base, adapters), X)
    assert relative_error(Net().apply(merged, X), served) < 1e-5
    gradient = jax.grad(lambda v: MODEL.apply(v, X).sum(), allow_int=True)
    for variables, function in ((VARIABLES, gradient), (base, jax.jit(gradient))):
        with pytest.raises(TypeError, match="frozen"):
            function(with_adapters(variables, adapters))


def test_dropout_takes_the_rng_of_that_name(base, adapters):
    adapters = jax.tree.map(lambda a: a + 0.1, adapters)
    variables = with_adapters(base, adapters)
    one, same, other = (
        APPLY(variables, X, rngs={"dropout": jax.random.key(i)}) for i in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, same)
    assert jnp.any(one != other) and jnp.any(one != APPLY(variables, X))


class Partitioned(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.ones, ("a", "b"))
        layer = nn.scan(
            lambda module, x, _: (module(x), None),
            variable_axes={"params": 0, "aqt": 0},
            split_rngs={"params": True},
            length=2,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return layer(nn.Dense(16, kernel_init=init, name="dense"), x, None)[0]


def test_adapters_have_the_names_of_the_axes_of_their_kernels():
    rule = Rule(cfg=config.weight_only(8), adapter=config.Lora(2, 4))
    model, x = quantize_model(Partitioned(), [rule]), X[0]
    shapes = jax.eval_shape(Partitioned().init, jax.random.key(0), x)
    variables = jax.tree.map(lambda leaf: normal(leaf.shape), shapes)
    base = convert(model, variables, x)
    wanted = {"lora_a": ("layers", "a", None), "lora_b": ("layers", None, "b")}
    for one in (variables, base):
        adapters = model.init_adapters(one, x)
        ((entry,),) = (layer.values() for layer in adapters.values())
        assert {k: box.names for k, box in entry["adapter"].items()} == wanted
    merged = merge_adapters(model, with_adapters(variables, adapters), x)
    assert merged["params"]["dense"]["kernel"].names == ("layers", "a", "b")


def test_smoothed_weights_are_merged_unless_smoothing_is_absorbed():
    net, x = nn.Sequential([nn.LayerNorm(), nn.Dense(8)]), X[0]
    smoothing = config.smoothquant().fwd.smoothing
    cfg = config.update(config.weight_only(bits=8), {"fwd.smoothing": smoothing})
    model = quantize_model(net, [Rule(cfg=cfg, adapter=config.Lora(2, 4))])
    variables = calibrate(model, model.init(jax.random.key(0), x), [x])
    adapters = jax.tree.map(lambda a: a + 0.1, model.init_adapters(variables, x))
    for base in (variables, convert(model, variables, x)):
        tuned = with_adapters(base, adapters)
        merged = merge_adapters(model, tuned, x)
        out = net.apply({"params": merged["params"]}, x)
        assert relative_error(out, model.apply(tuned, x)) < 1e-5
    absorbed = absorb_smoothing(variables, ["layers_1"], into="layers_0")
    with pytest.raises(ValueError, match="layers_1' cannot be merged: the module"):
        merge_adapters(model, with_adapters(absorbed, adapters), x)


def test_adapters_beside_learned_scales():
    outs, net = [], nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(4)])
    for adapter in (None, config.Lora(2, 4)):
        model = quantize_model(net, [Rule(cfg=config.lsq(8), adapter=adapter)])
        variables = quick_jit(model.init)(jax.random.key(0), X)
        outs.append(quick_jit(model.apply)(variables, X))
    assert "lora_a" in str(jax.tree.structure(variables))
    np.testing.assert_array_equal(*outs)


def test_a_tied_embedding_is_not_merged():
    """The lookup has no adapter, and would read that of the logits."""

    class Tied(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(20, 8, name="embed")
            return embed.attend(nn.Dense(8)(embed(tokens)))

    tokens = jnp.arange(4)
    variables = quick_jit(Tied().init)(jax.random.key(0), tokens)
    model = quantize_model(
        Tied(), [Rule(cfg=None, adapter=config.Lora(rank=2, alpha=4))]
    )
    tuned = with_adapters(variables, model.init_adapters(variables, tokens))
    merge_adapters(model, tuned, tokens)  # As B starts at zero, nothing changes.
    tuned = jax.tree.map(lambda a: a + 0.1, tuned)
    with pytest.raises(ValueError, match="into 'embed/embedding': something"):
        merge_adapters(model, tuned, tokens)


def test_errors(base):
    with pytest.raises(ValueError, match='"params" has no adapters'):
        adapters_of(base)
    with pytest.raises(ValueError, match="has no parameters: make them with"):
        MODEL.apply(base, X)
    with pytest.raises(ValueError, match="has no parameters: make them with"):
        merge_adapters(MODEL, base, X)
    with pytest.raises(TypeError, match="adapters must be a mapping"):
        with_adapters(base, None)
    plain = quantize_model(Net(), NF4)
    with pytest.raises(ValueError, match="no rule has an adapter"):
        plain.init_adapters(VARIABLES, X)
    with pytest.raises(TypeError, match=r"merge_adapters takes what aqtlite\.flax"):
        merge_adapters(Net(), VARIABLES, X)
    assert aqtlite.is_frozen(base["params"]["head"]["kernel"])
