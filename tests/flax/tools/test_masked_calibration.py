"""Calibration with padded batches equals calibration without padding."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import aqtlite
from aqtlite import calibration, config
from aqtlite.flax import (
    AqtDotGeneral,
    AqtEinsum,
    calibrate,
    calibrate_in_float,
    convert,
    quantize_model,
)
from aqtlite.flax import nnx as aqt_nnx
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

TOKENS = jax.random.randint(jax.random.key(0), (2, 6), 0, 12)
LENGTHS = 6, 2
MASK = jnp.arange(6)[None] < jnp.array(LENGTHS)[:, None]
LOUD = 12
"""A token with a loud embedding, which padding consists of."""
PADDED = jnp.where(MASK, TOKENS, LOUD)
WITHOUT = [TOKENS[i : i + 1, :length] for i, length in enumerate(LENGTHS)]
PERCENTILE = config.static_int8(calibration.PercentileOverBatches(90))


class Decoder(nn.Module):
    """Causal attention and an MLP, with contractions to inject."""

    dot_general: object = None
    einsum: object = jnp.einsum
    is_scanned: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(13, 8)(tokens)
        block = Block
        if self.is_scanned:
            axes = {"params": 0, "aqt_stats": 0, "aqt": 0}
            block = nn.scan(
                nn.remat(Block), axes, split_rngs={"params": True}, length=2
            )
            x, _ = block(self.dot_general, self.einsum)(x, None)
        else:
            x, _ = block(self.dot_general, self.einsum)(x, None)
        return nn.Dense(3, dot_general=self.dot_general, name="head")(x)


class Block(nn.Module):
    dot_general: object
    einsum: object

    @nn.compact
    def __call__(self, x, _):
        dense = functools.partial(nn.Dense, dot_general=self.dot_general)
        h = nn.LayerNorm()(x)
        q, k, v = (dense(8, name=name)(h) for name in "qkv")
        scores = self.einsum("btd,bsd->bts", q, k)
        causal = jnp.tril(jnp.ones(scores.shape[1:], bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
        x = x + dense(8, name="out")(self.einsum("bts,bsd->btd", weights, v))
        return x + dense(8, name="down")(nn.gelu(dense(16, name="up")(x))), None


def initialized(model):
    variables = init(model, TOKENS)
    table = variables["params"]["Embed_0"]["embedding"]
    loud = table.at[LOUD].set(1e6)
    params = {**variables["params"], "Embed_0": {"embedding": loud}}
    return {**variables, "params": params}


def statistics_of(variables):
    return variables["aqt_stats"]


def made(cfg, kind, **options):
    """A model that is quantized by a config, and its variables."""
    model = Decoder(**options)
    if kind == "injected":
        model = Decoder(AqtDotGeneral(cfg), AqtEinsum(cfg), **options)
    else:
        model = quantize_model(model, cfg)
    return model, initialized(model)


def one_by_one(padded):
    return [padded[i : i + 1] for i in range(len(padded))]


def assert_close(got, wanted, rtol=2e-5):
    """Checks that statistics are equal, but for rounding."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    for one, other in pairs:
        scale = np.abs(other).max()
        np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol * scale / 10)


SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "is_scanned"),
    [
        ("injected", True),
        ("rules", False),
    ],
)
def test_statistics_of_the_float_model(kind, is_scanned):
    model, variables = made(PERCENTILE, kind, is_scanned=is_scanned)
    mask = lambda tokens: tokens != LOUD  # noqa: E731
    got = calibrate_in_float(model, variables, [PADDED], mask=mask)
    wanted = calibrate_in_float(model, variables, WITHOUT)
    leaves = zip(*map(jax.tree.leaves, map(statistics_of, (got, wanted))), strict=True)
    for one, other in leaves:
        if one.ndim > is_scanned:
            np.testing.assert_array_equal(one, other)
    serving = convert(model, got, TOKENS)
    assert jnp.isfinite(jax.jit(model.apply)(serving, TOKENS)).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SLOW("injected"), "rules"])
def test_statistics_of_the_quantized_model(kind):
    model, variables = made(config.static_int8(), kind)
    masks = one_by_one(MASK)
    got = calibrate(model, variables, one_by_one(PADDED), mask=masks)
    wanted = calibrate(model, variables, WITHOUT)
    assert_close(statistics_of(got), statistics_of(wanted), rtol=0.02)


def test_a_batch_without_tokens_changes_nothing():
    model, variables = made(config.static_int8(), "injected")
    before = calibrate(model, variables, [TOKENS])
    batches = [jnp.full_like(TOKENS, LOUD), TOKENS]
    with pytest.warns(UserWarning, match=r"have no element that .*'lhs'\]: batch 0"):
        after = calibrate(model, variables, batches, mask=lambda x: x != LOUD)
    jax.tree.map(
        np.testing.assert_array_equal, statistics_of(after), statistics_of(before)
    )


def calibrated_by(kind, mask):
    """Calibrates two layers with the same mask in two batches."""
    x, cfg = jnp.ones((*mask.shape, 4)), config.static_int8()
    if kind == "function":
        quantized = aqtlite.quantize_function(jnp.matmul, cfg)
        args = x, jnp.ones((4, 4))
        state = quantized.init_state(*args)
        return quantized.gather_counted((mask, None), state, *args)
    if kind == "nnx":
        layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(2)]
        model = aqt_nnx.quantize_model(nnx.Sequential(*layers), cfg)
        return aqt_nnx.calibrate(model, [x, x], mask=[mask, mask])
    if kind == "rules":
        model = quantize_model(nn.Sequential([nn.Dense(4), nn.Dense(4)]), cfg)
    else:
        dot_general = AqtDotGeneral(cfg)
        layers = [nn.Dense(4, dot_general=dot_general) for _ in range(2)]
        model = nn.Sequential(layers)
    variables = init(model, x)
    run = calibrate_in_float if kind == "in float" else calibrate
    return run(model, variables, [x, x], mask=[mask, mask])


@pytest.mark.parametrize("kind", ["injected", "rules", "in float", "nnx", "function"])
def test_masks_by_which_nothing_counts_are_refused(kind):
    with pytest.raises(ValueError, match=r"in no batch does one count.*\['lhs'\]"):
        calibrated_by(kind, jnp.zeros((2, 3), bool))
    calibrated_by(kind, jnp.zeros((2, 3), bool).at[0, 0].set(True))


SMOOTHED = config.update(
    config.static_int8(),
    {"fwd.smoothing": config.Smoothing(lhs_calibration=calibration.MaxOverBatches())},
)


ROTATED = config.update(SMOOTHED, {"fwd.rotation": config.Hadamard()})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cfg", "kind"),
    [
        (config.gptq(bits=4), "injected"),
        SLOW(config.gptq(bits=4), "rules"),
        SLOW(SMOOTHED, "injected"),
        SLOW(SMOOTHED, "rules"),
        (ROTATED, "rules"),
    ],
)
def test_moments_and_smoothing(cfg, kind):
    model = Decoder(AqtDotGeneral(cfg))
    if kind == "rules":
        layers = aqtlite.Rule(path=".*/([qkv]|out|up|down|head)", cfg=cfg)
        model = quantize_model(Decoder(), [layers])
    variables, padded = initialized(model), one_by_one(PADDED)
    got = calibrate_in_float(model, variables, padded, mask=lambda x: x != LOUD)
    wanted = calibrate_in_float(model, variables, WITHOUT)
    assert_close(statistics_of(got), statistics_of(wanted))
    assert jax.tree.leaves(statistics_of(got))


class Recurrent(nn.Module):
    dot_general: object

    @nn.compact
    def __call__(self, batch):
        x = nn.Conv(8, (3,), padding="CAUSAL")(batch["x"])
        cell = nn.GRUCell(8)
        x = nn.RNN(cell)(x)
        return nn.Dense(2, dot_general=self.dot_general)(x)


@pytest.mark.slow
def test_a_batch_that_is_a_mapping():
    model = Recurrent(AqtDotGeneral(PERCENTILE))
    x = jax.random.normal(jax.random.key(0), (2, 6, 4))
    batch = {"x": jnp.where(MASK[..., None], x, 1e9), "counts": MASK}
    variables = init(model, batch)
    got = calibrate(model, variables, [batch], mask=lambda batch: batch["counts"])
    without = [{"x": x[i : i + 1, :n]} for i, n in enumerate(LENGTHS)]
    wanted = calibrate(model, variables, without)
    counts = [jax.tree.leaves(one["aqt_stats"]["Dense_0"])[1] for one in (got, wanted)]
    np.testing.assert_array_equal(*counts)


class Translator(nn.Module):
    dot_general: object

    @nn.compact
    def __call__(self, source, target, is_source):
        attention = nn.MultiHeadDotProductAttention(
            2, out_dot_general=self.dot_general, qkv_dot_general=self.dot_general
        )
        return attention(target, source, mask=is_source[:, None, None])


@pytest.mark.slow
def test_a_mask_for_each_argument():
    model = Translator(AqtDotGeneral(PERCENTILE))
    source, target = jax.random.normal(jax.random.key(0), (2, 2, 6, 4))
    is_source, is_target = MASK, MASK[::-1]
    padded = (
        jnp.where(is_source[..., None], source, 1e9),
        jnp.where(is_target[..., None], target, -1e9),
        is_source,
    )
    variables = init(model, *padded)
    masks = is_source, is_target, None
    got = calibrate(model, variables, [padded], mask=lambda batch: masks)
    sizes = list(zip(LENGTHS, LENGTHS[::-1], strict=True))
    without = [
        (source[i : i + 1, :n], target[i : i + 1, :m], jnp.ones((1, n), bool))
        for i, (n, m) in enumerate(sizes)
    ]
    wanted = calibrate_in_float(model, variables, without)
    module = "MultiHeadDotProductAttention_0"
    for layer in ("query", "key", "value"):
        one, other = (
            jax.tree.leaves(x["aqt_stats"][module][layer])[1] for x in (got, wanted)
        )
        np.testing.assert_array_equal(one, other)


class Folded(nn.Module):
    dot_general: object

    @nn.compact
    def __call__(self, x):
        y = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return nn.Dense(2, dot_general=self.dot_general, name="last")(y)


def test_errors_name_the_layer():
    model, x = Folded(AqtDotGeneral(PERCENTILE)), jnp.ones((2, 6, 4))
    variables = init(model, x)
    with pytest.raises(ValueError, match="the lhs of .* in last, .*pure_callback"):
        calibrate(model, variables, [x], mask=[MASK])
    with pytest.raises(ValueError, match=r"\(6, 2\), which are the leading axes of no"):
        calibrate(model, variables, [x], mask=[MASK.T])


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(13, 8, rngs=rngs)
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, tokens, scale=1.0):
        return self.down(nnx.gelu(self.up(self.embed(tokens)))) * scale


@pytest.mark.parametrize("gather", [aqt_nnx.calibrate, aqt_nnx.calibrate_in_float])
def test_nnx(gather):
    float_model = Mlp(nnx.Rngs(0))
    table = float_model.embed.embedding
    table.set_value(table[...].at[LOUD].set(1e6))
    got, wanted = (aqt_nnx.quantize_model(float_model, PERCENTILE) for _ in range(2))
    padded = [(x, 2.0) for x in one_by_one(PADDED)]
    gather(got, padded, mask=lambda batch: batch[0] != LOUD)
    gather(wanted, [(x, 2.0) for x in WITHOUT])
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5),
        *(nnx.state(model.aqt) for model in (got, wanted)),
    )


def test_nnx_learned_scales():
    cfg = config.update(config.lsq(8), {"fwd.rhs.rounding": config.Gptq()})
    model = aqt_nnx.quantize_model(Mlp(nnx.Rngs(0)), cfg)
    with pytest.raises(ValueError, match="the learned scales of down, up would start"):
        aqt_nnx.calibrate(model, [PADDED], mask=[MASK])
    model = aqt_nnx.quantize_model(Mlp(nnx.Rngs(0)), cfg)
    aqt_nnx.init_state(model, TOKENS)
    aqt_nnx.calibrate(model, [PADDED], mask=[MASK])


def test_functions():
    def network(params, tokens, *, scale, kind="tanh"):
        assert isinstance(kind, str)
        x = params["table"][tokens] * scale
        return jnp.tanh(x @ params["up"]) @ params["down"]

    keys = iter(jax.random.split(jax.random.key(0), 3))
    shapes = {"table": (13, 8), "up": (8, 16), "down": (16, 2)}
    params = {k: jax.random.normal(next(keys), one) for k, one in shapes.items()}
    params["table"] = params["table"].at[LOUD].set(jnp.nan)
    quantized = aqtlite.quantize_function(network, PERCENTILE, params=0)
    state = quantized.init_state(params, TOKENS, scale=2.0)
    gather = jax.jit(functools.partial(quantized.gather_counted, kind="tanh"))
    got = gather(MASK, state, params, PADDED, scale=2.0)
    for x in WITHOUT:
        state = quantized.gather(state, params, x, scale=2.0)
    for path, entry in state["aqt_stats"].items():
        np.testing.assert_array_equal(
            got["aqt_stats"][path]["lhs"].state["counts"], entry["lhs"].state["counts"]
        )
    with pytest.raises(TypeError, match="takes a state"):
        quantized.gather_counted(MASK, params, PADDED)
