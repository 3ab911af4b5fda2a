"""Numbers of quantized contractions, read beside a training step (`aqtlite.taps`)."""

import functools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import aqtlite
from aqtlite import Rule
from aqtlite.flax import AqtDotGeneral
from aqtlite.flax import nnx as aqt_nnx
from tests.common import MATMUL, nearest, normal, quick_jit

pytestmark = pytest.mark.code("quick")

INT8 = nearest()
DOT = aqtlite.make_dot_general(INT8)
X, W, LABELS = normal((6, 16)), normal((16, 8), 1), normal((6, 8), 2)


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        dot_general = AqtDotGeneral(INT8)
        x = nn.relu(nn.Dense(16, dot_general=dot_general, name="first")(x))
        return nn.Dense(8, dot_general=dot_general, name="second")(x)


MODEL = Mlp()
VARIABLES = MODEL.init(jax.random.key(0), X)


def loss(variables, x):
    return jnp.square(MODEL.apply(variables, x) - LABELS).mean()


def decibels(exact, other):
    exact, other = (np.asarray(x, np.float64) for x in (exact, other))
    return 10 * np.log10(np.sum(exact**2) / np.sum((other - exact) ** 2))


def rounded(x, axis):
    scale = np.abs(x).max(axis, keepdims=True) / 127.5
    return np.clip(np.round(x / scale), -127, 127) * scale


@pytest.fixture(scope="module")
def tapped():
    return aqtlite.tap_against_float(jax.value_and_grad(loss))(VARIABLES, X)


def of(taps, path, operand):
    (one,) = (x for x in taps.operands if (x.path, x.operand) == (path, operand))
    return one


def test_every_operand_of_every_contraction_is_read(tapped):
    _, taps = tapped
    assert [(one.path, one.operand) for one in taps.operands] == [
        ("Mlp/first", "fwd.lhs"),
        ("Mlp/first", "fwd.rhs"),
        ("Mlp/second", "fwd.lhs"),
        ("Mlp/second", "fwd.rhs"),
        ("Mlp/second", "dlhs.lhs"),
        ("Mlp/second", "drhs.lhs"),
        ("Mlp/first", "drhs.lhs"),
    ]
    assert {one.grid for one in taps.operands} == {"int8"}
    assert of(taps, "Mlp/second", "drhs.lhs").shape == (6, 8)


def test_the_result_is_that_of_the_function(tapped):
    found, _ = tapped
    wanted = quick_jit(jax.value_and_grad(loss))(VARIABLES, X)
    # Sums of floats, as those of biases, may be in another order.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, found, wanted)


def test_figures_are_those_of_numpy(tapped):
    _, taps = tapped
    kernel = np.asarray(VARIABLES["params"]["first"]["kernel"], np.float64)
    for x, axis, one in (
        (np.asarray(X, np.float64), 1, of(taps, "Mlp/first", "fwd.lhs")),
        (kernel, 0, of(taps, "Mlp/first", "fwd.rhs")),
    ):
        assert abs(one.snr - decibels(x, rounded(x, axis))) < 0.01
        assert one.largest == np.abs(x).max().astype(np.float32)
        assert one.flushed == pytest.approx(np.mean((rounded(x, axis) == 0) & (x != 0)))
        assert abs(one.reach - 1) < 1e-5
        assert one.clipped == one.not_finite == one.lost == 0
        channels = np.abs(x).max(1 - axis)
        others = np.delete(channels, channels.argmax())
        ratio = channels.max() / np.exp(np.log(others).mean())
        assert (one.axis, one.channel) == (axis, channels.argmax())
        assert one.ratio == pytest.approx(ratio, rel=1e-4)


def test_results_and_gradients_are_compared_with_floats(tapped):
    (_, gradient), taps = tapped
    x, w = (
        np.asarray(one, np.float64)
        for one in (X, VARIABLES["params"]["first"]["kernel"])
    )
    result = taps.results[0]
    assert (result.path, result.contraction) == ("Mlp/first", "fwd")
    wanted = decibels(x @ w, rounded(x, 1) @ rounded(w, 0))
    assert abs(result.snr - wanted) < 0.01
    assert {one.contraction for one in taps.results} == {"fwd", "dlhs", "drhs"}

    def in_float(params, x):
        x = nn.relu(x @ params["first"]["kernel"] + params["first"]["bias"])
        out = x @ params["second"]["kernel"] + params["second"]["bias"]
        return jnp.square(out - LABELS).mean()

    exact = quick_jit(jax.grad(in_float))(VARIABLES["params"], X)
    errors = {one.path: one.snr for one in taps.errors}
    for layer in ("first", "second"):
        wanted = decibels(exact[layer]["kernel"], gradient["params"][layer]["kernel"])
        assert abs(errors[f"1/params/{layer}/kernel"] - wanted) < 0.1
    assert "0" in errors


def test_scans_checkpoints_and_maps_have_axes_of_their_own():
    def forward(ws, x):
        @jax.checkpoint
        def layer(x, w):
            with jax.named_scope("block"):
                return jnp.tanh(DOT(x, w, MATMUL)), None

        return jax.lax.scan(layer, x, ws)[0].sum()

    ws, x = normal((3, 16, 16)), normal((2, 4, 16))
    step = jax.vmap(jax.grad(forward), (None, 0))
    _, taps = aqtlite.tap(step)(ws, x)
    names = [(one.path, one.operand) for one in taps.operands]
    operands = ("fwd.lhs", "fwd.rhs", "dlhs.lhs", "drhs.lhs")
    assert names == [("block", operand) for operand in operands]
    lhs, rhs = taps.operands[:2]
    assert lhs.snr.shape == (3, 2) and lhs.shape == (4, 16)
    wanted = decibels(x[1], rounded(np.asarray(x[1]), 1))
    assert abs(lhs.snr[0, 1] - wanted) < 0.01
    snrs = [decibels(w, rounded(np.asarray(w), 0)) for w in ws]
    np.testing.assert_allclose(
        np.asarray(rhs.snr).reshape(3, -1)[:, 0], snrs, atol=0.01
    )


def test_functions_by_rules_and_equal_paths():
    def forward(w, x):
        with jax.named_scope("twice"):
            x = jnp.tanh(x @ w)
            return (x @ w[:, :4]).sum()

    quantized = aqtlite.quantize_function(forward, INT8, params=0)
    _, taps = aqtlite.tap(jax.grad(quantized))(normal((16, 16)), X)
    shapes = {(x.path, x.operand): x.shape for x in taps.operands}
    # Gradients are told apart, too, although the last one comes first.
    assert shapes["twice", "fwd.rhs"] == (16, 16)
    assert shapes["twice#1", "fwd.rhs"] == (16, 4)
    assert shapes["twice", "drhs.lhs"] == (6, 16)
    assert shapes["twice#1", "drhs.lhs"] == (6, 4)


def test_nnx_models_are_updated():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(16, 16, rngs=rngs)
            self.second = nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x):
            return self.second(nnx.relu(self.first(x)))

    def step(model, optimizer, x):
        def loss(model):
            return jnp.square(model(x) - LABELS).mean()

        value, gradient = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradient)
        return value

    def trained(step):
        rules = Rule(operands="weight", cfg=INT8)
        model = aqt_nnx.quantize_model(Model(nnx.Rngs(0)), rules)
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        return step(model, optimizer, X), model

    (value, taps), model = trained(aqtlite.tap(step))
    wanted, same = trained(nnx.jit(step))
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(
        model.first.kernel[...], same.first.kernel[...], rtol=1e-4, atol=1e-6
    )
    assert [one.path for one in taps.operands][:4:2] == ["first", "second"]
    assert len(taps.operands) == 7


def test_every_few_steps_inside_of_a_compiled_loop():
    written = {}

    def write(step, scalars):
        written[int(step)] = {name: float(x) for name, x in scalars.items()}

    def step(w, x):
        def loss(w):
            with jax.named_scope("layer"):
                return jnp.square(DOT(x, w, MATMUL)).mean()

        return w - 0.1 * jax.grad(loss)(w)

    def with_taps(i, w, x):
        w, taps = aqtlite.tap(step)(w, x)
        jax.debug.callback(write, i, taps.scalars())
        return w

    @quick_jit
    def train(w, x):
        def one(w, i):
            is_measured, plain = i % 2 == 0, lambda i, w, x: step(w, x)
            return jax.lax.cond(is_measured, with_taps, plain, i, w, x), None

        return jax.lax.scan(one, w, jnp.arange(4))[0]

    jax.block_until_ready(train(W, X))
    jax.effects_barrier()
    assert sorted(written) == [0, 2]
    assert 30 < written[0]["layer/fwd.rhs/snr"] < 60
    assert written[2]["layer/drhs.lhs/largest"] > 0


def test_a_branch_that_is_not_taken_is_missing():
    def either(is_taken, x, w):
        contract = lambda x, w: DOT(x, w, MATMUL)  # noqa: E731
        return jax.lax.cond(is_taken, contract, lambda x, w: x @ w, x, w)

    tapped = aqtlite.tap(either)
    assert np.isnan(tapped(False, X, W)[1].operands[0].snr)
    assert tapped(True, X, W)[1].operands[0].snr > 30


def test_other_dtypes():
    x, w = X.astype("bfloat16"), W.astype("bfloat16")
    _, taps = aqtlite.tap(lambda x, w: DOT(x, w, MATMUL))(x, w)
    wide = np.asarray(x, np.float64)
    assert abs(taps.operands[0].snr - decibels(wide, rounded(wide, 1))) < 0.05


def test_empty_operands():
    _, taps = aqtlite.tap(lambda x, w: DOT(x, w, MATMUL))(X[:0], W)
    assert taps.operands[0].largest == 0 and taps.operands[0].clipped == 0


def test_tables_json_and_plots(tapped, tmp_path):
    _, taps = tapped
    text = repr(taps)
    assert "Mlp/second" in text and "dlhs.lhs" in text and "1/params/first/bias" in text
    assert "<table>" in taps._repr_html_()
    read = json.loads(taps.to_json())
    assert read["operands"][0]["path"] == "Mlp/first"
    assert read["operands"][0]["noise"] == 0
    scalars = taps.scalars()
    assert scalars["Mlp/first/fwd.lhs/snr"] == taps.operands[0].snr
    assert scalars["Mlp/first/drhs/snr"] == taps.results[-1].snr
    for given, name in ((taps, "bars.png"), ({0: taps, 100: taps}, "lines.svg")):
        aqtlite.plot_taps(given, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    with pytest.raises(ValueError, match="ends in one of"):
        aqtlite.plot_taps(taps, tmp_path / "bars.xyz")
    with pytest.raises(TypeError, match="takes the taps"):
        aqtlite.plot_taps([taps], tmp_path / "bars.png")


def test_what_cannot_be_tapped():
    with pytest.raises(TypeError, match="got the model Mlp: give a training step"):
        aqtlite.tap(MODEL)
    with pytest.raises(TypeError, match="tap takes a function, got 3"):
        aqtlite.tap(3)
    with pytest.raises(ValueError, match="nothing to tap"):
        aqtlite.tap(jnp.matmul)(X, W)
