"""A training step with a NaN or an infinity is NaN, and spoils no statistics."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import aqtlite
from aqtlite import calibration, config
from aqtlite.flax import AqtDotGeneral, quantize_model
from aqtlite.flax import nnx as aqt_nnx
from tests.common import mostly_slow, normal

pytestmark = pytest.mark.code("quick")

X = normal((6, 8))
BAD = X.at[3, 5].set(jnp.nan), X.at[0, 0].set(-jnp.inf)
GOOD = X, 2 * X, 3 * X
PRESETS = {
    "fp8": config.fp8(delayed=True),
    "moving": config.static_int8(calibration.MovingAverage()),
    "deviations": config.static_int8(
        calibration.WeightedDeviations(l1_coeff=1, max_coeff=1)
    ),
    "percentile": config.static_int8("percentile"),
    "mse": config.static_int8("mse"),
    "delayed": config.static_int8(calibration.DelayedScaling(length=2)),
    "smoothquant": config.smoothquant(),
    "gptq": config.gptq(),
}
STATES = "aqt_stats", "_overwrite_with_gradient"


def of_linen(model):
    """A training step on one batch: its loss and gradients, and the states after it."""
    variables = jax.jit(model.init)(jax.random.key(0), X)
    states = {name: variables[name] for name in STATES if name in variables}

    def loss_of(params, of_gradients, stats, x):
        given = {"params": params, "aqt_stats": stats}
        given |= {"_overwrite_with_gradient": of_gradients} if of_gradients else {}
        out, changed = model.apply(given, x, mutable=["aqt_stats"])
        return (out**2).sum(), changed["aqt_stats"]

    @jax.jit
    def step(states, x):
        of_gradients, stats = states.get(STATES[1], {}), states["aqt_stats"]
        (loss, stats), (of_params, of_gradients) = jax.value_and_grad(
            loss_of, (0, 1), has_aux=True
        )(variables["params"], of_gradients, stats, x)
        after = {"aqt_stats": stats, STATES[1]: of_gradients}
        return (loss, of_params), {name: after[name] for name in states}

    return step, states


def injected(cfg):
    dot_general = AqtDotGeneral(cfg)
    layers = [nn.Dense(8, dot_general=dot_general), nn.relu]
    return of_linen(nn.Sequential([*layers, nn.Dense(4, dot_general=dot_general)]))


def by_rules(cfg):
    model = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(4)])
    return of_linen(quantize_model(model, cfg))


def of_nnx(cfg):
    rngs = nnx.Rngs(0)
    layers = nnx.Linear(8, 8, rngs=rngs), nnx.relu, nnx.Linear(8, 4, rngs=rngs)
    model = aqt_nnx.quantize_model(nnx.Sequential(*layers), cfg)
    aqt_nnx.init_state(model, X)
    model.train()
    wrt = nnx.DiffState(0, nnx.Any(nnx.Param, aqt_nnx.GradientStatistics))
    graphdef, first = nnx.split(model)

    @jax.jit
    def step(state, x):
        model = nnx.merge(graphdef, state)
        run = nnx.value_and_grad(lambda model: (model(x) ** 2).sum(), argnums=wrt)
        loss, grads = run(model)
        of_params = aqt_nnx.overwrite_with_gradient(model, grads)
        return (loss, nnx.as_pure(of_params)), nnx.state(model)

    return step, first


def of_function(cfg):
    def function(params, x):
        return jax.nn.relu(x @ params["up"]) @ params["down"]

    params = {"up": normal((8, 8), 1), "down": normal((8, 4), 2)}
    quantized = aqtlite.quantize_function(function, cfg, params=0)

    def loss_of(state, params, x):
        out, state = quantized(state, params, x)
        return (out**2).sum(), state

    @jax.jit
    def step(state, x):
        run = jax.value_and_grad(loss_of, (0, 1), has_aux=True, allow_int=True)
        (loss, state), (of_state, of_params) = run(state, params, x)
        if STATES[1] in state:
            state = aqtlite.with_gradient_statistics(state, of_state)
        return (loss, of_params), state

    return step, quantized.init_state(params, X)


PATHS = {f.__name__: f for f in (injected, by_rules, of_nnx, of_function)}


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        [f"{path} {preset}" for path in PATHS for preset in PRESETS],
        "injected fp8",
        "of_nnx fp8",
        "of_function moving",
    ),
)
def test_a_step_on_a_bad_batch_is_nan_and_enters_no_statistics(case):
    path, preset = case.split()
    step, first = PATHS[path](PRESETS[preset])

    def trained(batches):
        states = first
        for x in batches:
            _, states = step(states, x)
        return states

    wanted = trained(GOOD)
    nan, infinite = BAD
    one, *more = GOOD
    found = trained([nan, one, infinite, nan, *more])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(wanted))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    for x in BAD:
        (loss, gradients), _ = step(found, x)
        assert not np.isfinite(loss)
        assert not all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))


@pytest.mark.parametrize("preset", ["fp8", "smoothquant"])
def test_the_first_of_all_without_jit(preset):
    """Nothing is gathered, and a call that needs a range says why there is none."""
    quantized = aqtlite.quantize_function(jnp.matmul, PRESETS[preset], params=1)
    args = X, normal((8, 4), 2)
    first = quantized.init_state(*args)
    found = quantized.gather(first, BAD[0], args[1])
    jax.tree.map(np.testing.assert_array_equal, found, first)
    with pytest.raises(ValueError, match="a batch with NaN or infinity enters none"):
        quantized(first, BAD[0], args[1])


def test_a_first_gradient_that_is_not_finite_says_what_to_do():
    model = nn.Dense(4, dot_general=AqtDotGeneral(config.fp8(delayed=True)))
    variables = jax.jit(model.init)(jax.random.key(0), X)
    _, gathered = model.apply(variables, X, mutable=["aqt_stats"])

    def loss(variables):
        return (model.apply({**variables, **gathered}, BAD[0]) ** 2).sum()

    del variables["aqt_stats"]
    with pytest.raises(ValueError, match="no statistics yet: its first update is the"):
        jax.grad(loss)(variables)
