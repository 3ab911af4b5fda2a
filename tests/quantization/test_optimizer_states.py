"""Moments of optimizers in 8 bits between steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import aqtlite
from aqtlite import QTensor, calibration, config, numerics
from tests.common import assert_same, normal, quick_jit, rms_error

pytestmark = pytest.mark.code("quick")

PARAMS = {
    "embed": {"embedding": normal((64, 80))},
    "dense": {"kernel": normal((80, 64)), "bias": normal((64,))},
}
GRADS = jax.tree.map(lambda x: 0.1 * x + 0.05, PARAMS)
LINEAR = config.Tensor(
    numerics=numerics.IntSymmetric(bits=8), blocks=config.Blocks(size=16)
)


def quantized_paths(state):
    leaves = jax.tree.leaves_with_path(state, is_leaf=lambda x: isinstance(x, QTensor))
    names = {
        jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves
    }
    return {name: x for name, x in names.items() if isinstance(x, QTensor)}


def run(tx, state, count=3, params=PARAMS):
    update = quick_jit(tx.update)
    grads = jax.tree.map(lambda g, x: g.astype(x.dtype), GRADS, params)
    for i in range(count):
        scaled = jax.tree.map(
            lambda g, i=i: g * np.float32(i - 1.5).astype(g.dtype), grads
        )
        updates, state = update(scaled, state, params)
    return updates, state


def test_adam_by_default():
    tx = aqtlite.quantize_optimizer(optax.adamw(1e-3))
    state = tx.init(PARAMS)
    found = quantized_paths(state)
    assert set(found) == {"0/mu/dense/kernel", "0/nu/dense/kernel"}
    mu, nu = found.values()
    assert (mu.numerics.name, nu.numerics.name) == ("dynamic8", "udynamic8")
    assert mu.scale.shape == (1, 64)  # The longest axis has the longest blocks.
    got, after = run(tx, state)
    wanted, in_float = run(optax.adamw(1e-3), optax.adamw(1e-3).init(PARAMS))
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert rms_error(a, b) < 0.1
    exact = np.asarray(in_float[0].mu["dense"]["kernel"])
    error = np.abs(after[0].mu["dense"]["kernel"].dequant() - exact)
    assert (error < 0.06 * np.abs(exact).max(0)).all()
    # A state in float is quantized by its first step.
    _, continued = run(tx, in_float, 1)
    assert jax.tree.structure(continued) == jax.tree.structure(state)


def test_in_a_scan_a_checkpoint_and_taken_apart(tmp_path):
    tx = aqtlite.quantize_optimizer(optax.adam(1e-3))

    def step(state, _):
        return tx.update(GRADS, state, PARAMS)[1], None

    run = quick_jit(
        lambda s: jax.lax.scan(step, s, None, length=2)[0], donate_argnums=0
    )
    state = run(tx.init(PARAMS))
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "state", state)
    checkpointer.wait_until_finished()
    assert_same(checkpointer.restore(tmp_path / "state", state), state)
    wanted = quick_jit(tx.update)(GRADS, state, PARAMS)
    # Arrays of a quantized moment in a mapping are what they were.
    leaves = {"qvalue": state[0].mu["dense"]["kernel"].qvalue}
    leaves["scale"] = state[0].mu["dense"]["kernel"].scale
    mu = {**state[0].mu, "dense": {**state[0].mu["dense"], "kernel": leaves}}
    apart = (state[0]._replace(mu=mu), *state[1:])
    assert_same(quick_jit(tx.update)(GRADS, apart, PARAMS), wanted)


TXS = {
    "momentum": (optax.sgd(0.1, momentum=0.9), 1),
    "rmsprop": (optax.rmsprop(1e-3), 1),
    "lion": (optax.lion(1e-3), 1),
    "amsgrad": (optax.amsgrad(1e-3), 3),
    "hyperparameters": (optax.inject_hyperparams(optax.adam)(learning_rate=1e-3), 2),
    "labels": (
        optax.multi_transform(
            {"a": optax.adam(1e-3), "b": optax.sgd(1e-2)}, {"embed": "b", "dense": "a"}
        ),
        2,
    ),
}


@pytest.mark.parametrize("name", TXS)
def test_around_other_transformations(name):
    tx, count = TXS[name]
    outer = aqtlite.quantize_optimizer(tx)
    state = outer.init(PARAMS)
    assert len(quantized_paths(state)) == count
    updates, after = jax.eval_shape(outer.update, GRADS, state, PARAMS)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert jax.tree.structure(updates) == jax.tree.structure(PARAMS)


def test_inside_of_other_transformations():
    inner = aqtlite.quantize_optimizer(optax.adam(1e-3))
    for tx in (
        optax.masked(inner, {"embed": False, "dense": True}),
        optax.MultiSteps(inner, 2),
        optax.chain(optax.clip_by_global_norm(1.0), inner),
    ):
        state = tx.init(PARAMS)
        assert len(quantized_paths(state)) == 2
        _, after = jax.eval_shape(tx.update, GRADS, state, PARAMS)
        assert jax.tree.structure(after) == jax.tree.structure(state)


def test_values_that_are_not_finite():
    bad = {**GRADS, "dense": {**GRADS["dense"]}}
    bad["dense"]["kernel"] = bad["dense"]["kernel"].at[3, 5].set(jnp.nan)
    inner = aqtlite.quantize_optimizer(optax.adam(1e-3))
    _, state = quick_jit(inner.update)(bad, inner.init(PARAMS), PARAMS)
    for moment in (state[0].mu, state[0].nu):
        values = moment["dense"]["kernel"].dequant()
        # The block of the column.
        np.testing.assert_array_equal(np.isnan(values).all(0), np.arange(64) == 5)
        assert np.isnan(values).sum() == 80
    tx = optax.apply_if_finite(inner, 3)
    before = tx.init(PARAMS)
    _, state = quick_jit(tx.update)(bad, before, PARAMS)
    assert_same(state.inner_state, before.inner_state)


def test_a_second_moment_that_is_negative_becomes_nan():
    tx = optax.GradientTransformation(
        lambda params: {"nu": params},
        lambda updates, state, params=None: (updates, state),
    )
    kernel = {"kernel": jnp.ones((64, 64)).at[0, 0].set(-1e-3)}
    state = aqtlite.quantize_optimizer(tx).init(kernel)
    assert np.isnan(state["nu"]["kernel"].dequant()).all()


def test_small_second_moments_stay_above_zero():
    grid = numerics.DynamicTree(signed=False)
    x = jnp.array([0.0, 1e-30, 1e-9, 3.25e-7, 1.0])
    assert (grid.decode(grid.round(x, None)) > 0).tolist() == [False, *[True] * 4]


@pytest.mark.parametrize("signed", [True, False])
def test_the_grid_rounds_to_the_nearest_value(signed):
    grid = numerics.DynamicTree(signed=signed)
    values = np.asarray(grid.decode(jnp.arange(256, dtype=jnp.uint8)), np.float64)
    assert len(set(values)) == 256 and (np.diff(values) > 0).all()
    assert values[-1] == 1 and values[[0, 127][signed]] == 0
    np.testing.assert_array_equal(grid.round(jnp.asarray(values), None), range(256))
    rng = np.random.default_rng(0)
    x = rng.uniform(-1 if signed else 0, 1.2, 3000).astype(np.float32) ** 5
    x = x[np.abs(x) > 3e-7]
    got = values[np.asarray(grid.round(jnp.asarray(x), None))]
    nearest = np.abs(x[:, None] - values).min(1)
    assert (np.abs(x - got) <= nearest + 1e-7 * np.abs(x)).all()


def test_other_grids_and_dtypes():
    cfg = config.OptimizerStates(
        first=LINEAR, second=LINEAR, in_float="", min_size=0, first_moments=".*mu/d.*"
    )
    tx = aqtlite.quantize_optimizer(optax.adam(1e-3), cfg)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    found = quantized_paths(tx.init(params))
    assert len(found) == 5 and "0/mu/embed/embedding" not in found
    assert found["0/mu/dense/bias"].scale.shape == (4,)
    updates, state = run(tx, tx.init(params), 1, params)
    assert updates["dense"]["bias"].dtype == jnp.bfloat16
    mu = state[0].mu["dense"]["kernel"]
    assert (mu.dtype, mu.qvalue.dtype) == (jnp.bfloat16, jnp.int8)
    assert config.OptimizerStates(min_size=0) != cfg == eval_of(cfg)


def eval_of(cfg):
    names = {**vars(config), **vars(numerics), **vars(calibration)}
    return eval(repr(cfg), names)


@pytest.mark.parametrize("make", [optax.adamw, lambda rate: optax.sgd(rate, 0.9)])
@pytest.mark.parametrize("name", ["nu", "mu", "trace"])
def test_parameters_may_have_the_names_of_moments(make, name):
    params = {one: {"kernel": jnp.ones((64, 128))} for one in (name, "other")}
    tx = aqtlite.quantize_optimizer(make(1e-2))
    state = tx.init(params)
    for _ in range(3):
        grads = jax.tree.map(lambda x: x - 2, params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    kernels = [one["kernel"] for one in params.values()]
    np.testing.assert_array_equal(*kernels)
    assert jnp.isfinite(kernels[0]).all()


def test_arrays_below_parameters_with_such_names_are_no_moments():
    params = {"mu": jnp.ones((64, 128))}
    chain = optax.chain(optax.adam(1e-3), optax.ema(0.9))
    tx = aqtlite.quantize_optimizer(
        optax.MultiSteps(chain, 2).gradient_transformation()
    )
    found = quantized_paths(tx.init(params))
    assert set(found) == {f"inner_opt_state/0/0/{one}/mu" for one in ("mu", "nu")}


def test_a_momentum_with_the_name_of_second_moments():
    params = {"w": jnp.ones((64, 128))}
    with pytest.raises(ValueError, match=r"optax\.sm3 calls its momentum nu"):
        aqtlite.quantize_optimizer(optax.sm3(1e-3)).init(params)
    cfg = config.OptimizerStates(first_moments=".*nu/.*", second_moments="(?!)")
    found = quantized_paths(
        aqtlite.quantize_optimizer(optax.sm3(1e-3), cfg).init(params)
    )
    assert set(found) == {"0/nu/w"}


def test_an_nnx_optimizer():
    model = nnx.Linear(80, 64, rngs=nnx.Rngs(0))
    tx = aqtlite.quantize_optimizer(optax.adam(1e-2))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        x = jnp.ones((2, 80))
        loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    nu = optimizer.opt_state[0].nu["kernel"].get_value()
    assert nu["qvalue"].dtype == jnp.uint8


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"first": config.Tensor()}, "first does not quantize"),
        ({"first": 8}, "first must be a config.Tensor, got 8"),
        ({"second_moments": "("}, "not a regular expression"),
        ({"in_float": None}, "in_float must be a string"),
        ({"min_size": -1}, "min_size must be 0 or more"),
        (
            {
                "second": config.Tensor(
                    numerics=LINEAR.numerics, calibration=calibration.LSQ()
                )
            },
            "by the scale of its values alone",
        ),
    ],
)
def test_configs_that_are_refused(fields, words):
    with pytest.raises((TypeError, ValueError), match=words):
        config.OptimizerStates(**fields)


def test_arguments_that_are_refused():
    with pytest.raises(TypeError, match="takes a transformation of optax"):
        aqtlite.quantize_optimizer(optax.adam)
    with pytest.raises(TypeError, match="must be a config.OptimizerStates, got 8"):
        aqtlite.quantize_optimizer(optax.adam(1.0), 8)
    with pytest.raises(ValueError, match="no array .* is a moment.*0/v_row/dense"):
        aqtlite.quantize_optimizer(optax.adafactor(1e-3)).init(PARAMS)
    cfg = config.OptimizerStates(
        first=config.Tensor(numerics=LINEAR.numerics, blocks=config.Blocks(size=48))
    )
    with pytest.raises(ValueError, match="0/mu/dense/kernel.*48"):
        aqtlite.quantize_optimizer(optax.adam(1.0), cfg).init(PARAMS)
