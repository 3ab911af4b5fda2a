"""Learned scales as parameters of Flax models."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import aqtlite
from aqtlite import calibration, checkpoint, config, numerics
from aqtlite.flax import AqtDotGeneral, convert, quantize_model
from aqtlite.flax import nnx as aqt_nnx
from aqtlite.testing import assert_served_equals_trained
from tests.checkpoint.support import assert_same, save
from tests.common import normal, quick_jit
from tests.flax.support import LAST_BY_FIRST, apply, init

pytestmark = pytest.mark.code("quick")

X = normal((16, 8))
LSQ4 = config.lsq(4)
UINT4 = numerics.IntAffine(bits=4)


class Mlp(nn.Module):
    """LSQ, LSQ+ and PACT."""

    cfg: config.DotGeneral = LSQ4

    @nn.compact
    def __call__(self, x):
        for name, how in (
            ("plus", calibration.LSQPlus()),
            ("pact", calibration.PACT()),
        ):
            changes = {"fwd.lhs.calibration": how, "fwd.lhs.numerics": UINT4}
            cfg = config.update(self.cfg, changes)
            x = nn.silu(nn.Dense(8, name=name, dot_general=AqtDotGeneral(cfg))(x))
        return nn.Dense(3, name="lsq", dot_general=AqtDotGeneral(self.cfg))(x)


ENTRY = "aqt_dot_general_ab_bc"


def dense(cfg=LSQ4, **kwargs):
    return nn.Dense(4, dot_general=AqtDotGeneral(cfg, **kwargs))


@pytest.mark.code("users")
def test_init_reads_the_batch_and_the_weights():
    model = dense()
    key = jax.random.key(0)
    params = jax.jit(model.init)(key, X)["params"]
    steps = params[ENTRY]
    root = np.sqrt(7)
    np.testing.assert_allclose(
        steps["lhs"]["step"], [[2 * np.abs(X).mean() / root]], rtol=1e-5
    )
    np.testing.assert_allclose(
        steps["rhs"]["step"],
        2 * np.abs(params["kernel"]).mean(0, keepdims=True) / root,
        rtol=1e-5,
    )
    # Other parameters are what they are without.
    plain = jax.jit(nn.Dense(4).init)(key, X)["params"]
    np.testing.assert_array_equal(params["kernel"], plain["kernel"])


def loss_after_training(cfg, steps=300):
    """Of a linear model."""
    x = normal((64, 16), 2)
    y = x @ normal((16, 4), 1)
    model = dense(cfg)
    optimizer = optax.adam(0.01)

    def loss(params):
        return jnp.mean((model.apply({"params": params}, x) - y) ** 2)

    def step(carry, _):
        params, state = carry
        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state)
        return (optax.apply_updates(params, updates), state), value

    @quick_jit
    def train(params):
        return jax.lax.scan(step, (params, optimizer.init(params)), length=steps)[1]

    return float(train(init(model, x)["params"])[-20:].mean())


def test_weights_alone_are_quantized_as_in_the_paper():
    """Esser et al. 2020, equations 1 to 5, in floats with straight-through rounding."""
    levels = 2 ** (3 - 1) - 1

    def reference(kernel, step, x):
        factor = 1 / np.sqrt(kernel.shape[0] * levels)
        step = step * factor + jax.lax.stop_gradient(step * (1 - factor))
        value = jnp.clip(kernel / step, -levels, levels)
        value += jax.lax.stop_gradient(jnp.round(value) - value)
        return x @ (value * step)

    model = nn.Dense(
        3, use_bias=False, dot_general=AqtDotGeneral(config.lsq_weight_only(3))
    )
    params = jax.jit(model.init)(jax.random.key(0), X)["params"]
    kernel = params["kernel"]
    (step,) = [x for x in jax.tree.leaves(params) if x.shape != kernel.shape]
    start = 2 * np.abs(kernel).mean(0) / np.sqrt(levels)
    np.testing.assert_allclose(step.ravel(), start, rtol=1e-6)

    weights = jnp.arange(float(len(X) * 3)).reshape(-1, 3)
    got, gradients = jax.value_and_grad(
        lambda params, x: jnp.sum(weights * model.apply({"params": params}, x)), (0, 1)
    )(params, X)
    wanted, expected = jax.value_and_grad(
        lambda *args: jnp.sum(weights * reference(*args)), (0, 1, 2)
    )(kernel, step.reshape(1, -1), X)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    found = [
        gradients[0]["kernel"],
        *(x for x in jax.tree.leaves(gradients[0]) if x.shape != kernel.shape),
        gradients[1],
    ]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            one.reshape(other.shape), other, rtol=1e-4, atol=1e-5
        )


@pytest.mark.slow
def test_two_bits_train_better_than_with_absmax():
    """Integers in all contractions, and one scale for the activations in both."""
    absmax = config.fully_quantized(fwd_bits=2)
    absmax = config.update(absmax, {"fwd.lhs.calib_shared_axes": "per_tensor"})
    assert loss_after_training(config.lsq(2)) < 0.8 * loss_after_training(absmax)


def test_runs_in_the_same_kernels():
    """The contractions that are compiled are those of `AbsMax`, in both directions."""
    lsq = config.lsq(8)
    absmax = config.update(lsq, {"fwd.*.calibration": calibration.AbsMax()})

    def dots(cfg):
        model = dense(cfg)

        def loss(variables, x):
            return jnp.sum(model.apply(variables, x) ** 2)

        grad = jax.jit(jax.grad(loss, (0, 1)))
        text = grad.lower(jax.eval_shape(model.init, jax.random.key(0), X), X).as_text()
        return sorted(re.findall(r"stablehlo.dot_general .* : (.*)", text))

    assert dots(lsq) == dots(absmax) and "i8>" in dots(lsq)[0]


@pytest.mark.slow
@pytest.mark.code("users")
def test_is_served_bit_for_bit():
    """Also where a step is negative, as some of these are."""
    model = Mlp()
    for variables in (jax.jit(model.init)(jax.random.key(0), X), init(model, X)):
        serving = convert(model, variables, X)
        assert set(serving["aqt"]) == {"plus", "pact", "lsq"}
        for x in (X, X[:1]):
            assert_served_equals_trained(model, variables, x, serving=serving)


def test_serving_reads_activation_steps_and_reduces_nothing():
    model = dense()
    variables = init(model, X)
    reports = []
    serving = convert(model, variables, X, report=reports.append)
    text = jax.jit(model.apply).lower(serving, X).as_text()
    assert "applies stablehlo.max" not in text
    assert "learned (2)" in str(reports[0]) and "unread" not in str(reports[0])
    wanted = model.apply(serving, X)
    step = serving["params"][ENTRY]["lhs"]
    step["step"] = 2 * step["step"]
    assert np.any(model.apply(serving, X) != wanted)


def test_what_is_left_in_serving_trains():
    """The bias, and the step of the activations; that of the weights is frozen."""
    model = dense()
    serving = convert(model, init(model, X), X)

    params = serving["params"]
    floats = {name: x for name, x in params.items() if not aqtlite.is_frozen(x)}

    def loss(floats):
        return jnp.sum(model.apply({**serving, "params": {**params, **floats}}, X) ** 2)

    gradients = quick_jit(jax.grad(loss, allow_int=True))(floats)
    assert np.any(gradients["bias"] != 0) and not np.any(
        gradients[ENTRY]["rhs"]["step"]
    )


def test_converts_on_disk(tmp_path):
    model = Mlp()
    variables = init(model, X)
    source = save(tmp_path / "float", variables, "msgpack")
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)
    loaded = checkpoint.load_serving(tmp_path / "out", model)
    assert_same(loaded, convert(model, variables, X))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(8, dot_general=AqtDotGeneral(LSQ4))(x), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        body = nn.scan(
            nn.remat(Layer),
            variable_axes={"params": 0, "aqt": 0},
            split_rngs={"params": True},
            length=3,
        )
        return body()(x, None)[0]


@pytest.mark.code("users")
def test_under_a_scan_each_layer_has_its_own():
    model = Scanned()
    variables = init(model, X)
    steps = jax.tree.leaves(variables["params"], is_leaf=lambda node: ENTRY in node)[0][
        ENTRY
    ]
    assert steps["lhs"]["step"].shape == (3, 1, 1)
    assert steps["rhs"]["step"].shape == (3, 1, 8)
    gradients = quick_jit(jax.grad(lambda v: jnp.sum(model.apply(v, X) ** 2)))(
        variables
    )
    for leaf in jax.tree.leaves(gradients):
        assert (np.abs(leaf).reshape(3, -1).max(1) > 0).all()
    assert_served_equals_trained(model, variables, X)


@pytest.mark.code("users")
@pytest.mark.parametrize("model", [dense(), Scanned()], ids=["dense", "scan"])
def test_starts_from_float_parameters(model):
    """As `init` does, given other weights."""
    variables = jax.jit(model.init)(jax.random.key(0), X)

    def without(tree):
        return {
            name: without(node) if isinstance(node, dict) else node
            for name, node in tree.items()
            if name != ENTRY
        }

    _, made = model.apply(without(variables), X, mutable=["params"])
    assert_same(jax.tree.map(jnp.asarray, made), {"params": variables["params"]})


def test_rules_start_as_injected_models_do():
    """From the batch, as contractions before them give it, and from float weights."""
    cfg = config.lsq(4)
    dot_general = AqtDotGeneral(cfg)
    injected, floats = (
        nn.Sequential([nn.Dense(8, **kwargs), nn.relu, nn.Dense(3, **kwargs)])
        for kwargs in ({"dot_general": dot_general}, {})
    )
    by_rules = quantize_model(floats, cfg)
    key = jax.random.key(0)
    wanted = jax.jit(injected.init)(key, X)
    assert_same(jax.jit(by_rules.init)(key, X), wanted)
    layers = wanted["params"].items()
    variables = {
        "params": {
            name: {k: x for k, x in layer.items() if not k.startswith("aqt_")}
            for name, layer in layers
        }
    }
    _, made = apply(by_rules, variables, X, mutable=["params"])
    # init may compute a mean with what makes the kernels, in one loop.
    made, wanted = map(dict, (made["params"], wanted["params"]))
    assert jax.tree.structure(made) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    with pytest.raises(ValueError, match=r"apply\(variables, x, mutable=\['params'\]"):
        by_rules.apply(variables, X)


class Twice(nn.Module):
    """One kernel, contracted by two names."""

    names: tuple[str | None, str | None]

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(), (8, 8))
        for name in self.names:
            x = AqtDotGeneral(LSQ4, name=name)(x, w, LAST_BY_FIRST)
        return x


def test_one_weight_on_two_steps_is_not_confused():
    model = Twice(("one", "two"))
    variables = init(model, X)
    assert set(variables["params"]) == {"w", "aqt_one", "aqt_two"}
    serving = convert(model, variables, X)
    assert "aqt" not in serving  # Nothing tells the two apart.
    np.testing.assert_array_equal(model.apply(serving, X), model.apply(variables, X))


def test_calls_of_one_name_share_a_step():
    model = Twice(("one", "one"))
    variables = init(model, X)
    assert set(variables["params"]) == {"w", "aqt_one"}
    assert_served_equals_trained(model, variables, X)


def test_errors():
    with pytest.raises(ValueError, match="same axes, which would share parameters"):
        Twice((None, None)).init(jax.random.key(0), X)
    model = dense()
    variables = init(model, X)
    del variables["params"][ENTRY]
    with pytest.raises(
        ValueError, match=f"no learned parameters '{ENTRY}' in the collection 'params'"
    ):
        model.apply(variables, X)
    with pytest.raises(ValueError, match="is learned was called outside of a Flax mod"):
        AqtDotGeneral(LSQ4)(X, normal((8, 4)), LAST_BY_FIRST)


def test_parameters_that_were_cast():
    """Their gradients have their dtype."""
    model = nn.Dense(8, dot_general=AqtDotGeneral(config.lsq(4)))
    x = normal((4, 16))
    variables = init(model, x)
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), variables)

    @quick_jit
    def gradients(*trees):
        return [jax.grad(lambda v: model.apply(v, x).sum())(one) for one in trees]

    got, wanted = gradients(cast, variables)
    for leaf, exact in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        assert leaf.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            leaf.astype("float32"), exact, atol=0.1 * np.abs(exact).max() + 1e-3
        )


@pytest.mark.parametrize("in_axes", [0, None])
def test_members_of_vmap_do_not_share_learned_scales(in_axes):
    class Heads(nn.Module):
        @nn.compact
        def __call__(self, x):
            lifted = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            heads = nn.vmap(nn.Dense, in_axes=in_axes, axis_size=3, **lifted)
            return heads(8, name="heads")(x)

    x = X if in_axes is None else jnp.stack([X] * 3)
    with pytest.raises(ValueError, match=r"'Heads/heads' would share .* fwd\.lhs, by"):
        quantize_model(Heads(), LSQ4).init(jax.random.key(0), x)
    of_weights = quantize_model(Heads(), config.lsq_weight_only(4))
    assert of_weights.init_with_output(jax.random.key(0), x)[0].shape == (3, 16, 8)


PACT4 = config.update(LSQ4, {"fwd.lhs.calibration": calibration.PACT()})


def test_parameters_of_another_calibration_are_refused():
    """By injected functions, by rules in Linen and NNX, and of functions."""
    injected = init(dense(), X)
    by_rules = init(quantize_model(nn.Dense(4), LSQ4), X)
    w = normal((8, 4))
    state = aqtlite.quantize_function(jnp.matmul, LSQ4, params=1).init_state(X, w)
    other = aqtlite.quantize_function(jnp.matmul, PACT4, params=1)
    model, changed = (
        aqt_nnx.quantize_model(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), cfg)
        for cfg in (LSQ4, PACT4)
    )
    aqt_nnx.init_state(model, X)
    nnx.update(changed, nnx.state(model))
    for call in (
        lambda: dense(PACT4).apply(injected, X),
        lambda: quantize_model(nn.Dense(4), PACT4).apply(by_rules, X),
        lambda: other(state, X, w),
        lambda: changed(X),
    ):
        with pytest.raises(
            ValueError, match=r"PACT.* learns \['bound'\], and was given"
        ):
            call()
