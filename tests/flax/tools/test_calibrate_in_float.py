"""Statistics of the float model: of one pass, whatever was gathered before."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import aqtlite
from aqtlite import Rule, calibration, config, statistics
from aqtlite.flax import (
    AqtDotGeneral,
    AqtTake,
    calibrate,
    calibrate_in_float,
    merge_statistics,
    quantize_model,
)
from aqtlite.flax import nnx as aqt_nnx
from tests.common import assert_same, normal
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

CFG = config.static_int8(calibration.MaxOverBatches())
BATCHES = [normal((4, 8), seed) * 2.0**seed for seed in range(4)]
X = BATCHES[0]


class Mlp(nn.Module):
    """Layers behind each other, one of them in a scan, one lifted."""

    cfg: config.DotGeneral | None = CFG
    is_lifted: bool = True

    def __call__(self, x):
        return self.layers(x)

    @nn.compact
    def layers(self, x):
        dot_general = self.cfg and AqtDotGeneral(self.cfg)
        dense, collections = nn.Dense, {"params": 0, "aqt_stats": 0}
        x = nn.tanh(nn.Dense(8, dot_general=dot_general)(x))
        if self.is_lifted:
            dense = nn.remat(nn.jit(nn.Dense))
        x = nn.tanh(dense(8, dot_general=dot_general, name="lifted")(x))

        def body(layer, x, _):
            return nn.tanh(layer(x)), None

        scan = nn.scan(
            body, variable_axes=collections, split_rngs={"params": True}, length=2
        )
        return scan(nn.Dense(8, dot_general=dot_general, name="scanned"), x, None)[0]


MODELS = {
    "injected": Mlp(),
    "by rules": quantize_model(Mlp(cfg=None, is_lifted=False), CFG),
}
each = pytest.mark.parametrize("name", MODELS)


def fresh(model):
    return init(model, X)


def merged_halves(calibrate, model, variables):
    first, second = (
        calibrate(model, variables, part) for part in (BATCHES[:2], BATCHES[2:])
    )
    return merge_statistics(model, first, [second], X)


def test_merged_halves_are_one_pass():
    """Bit for bit, where the order of batches is of no account."""
    model = Mlp()
    variables = fresh(model)
    one_pass = calibrate_in_float(model, variables, BATCHES)
    assert_same(merged_halves(calibrate_in_float, model, variables), one_pass)


@each
def test_the_order_of_batches_is_of_no_account(name):
    model = MODELS[name]
    variables = fresh(model)
    found, other = (
        calibrate_in_float(model, variables, batches)
        for batches in (BATCHES, BATCHES[::-1])
    )
    assert_same(found, other)


def test_means():
    """With `calibrate`, layers see what those before them rounded."""
    model = Mlp(config.static_int8(calibration.MeanOverBatches()))
    variables = fresh(model)

    def difference(calibrate):
        one_pass = calibrate(model, variables, BATCHES)
        halves = merged_halves(calibrate, model, variables)
        pairs = zip(jax.tree.leaves(one_pass), jax.tree.leaves(halves), strict=True)
        return max(
            np.max(np.abs(a - b) / np.maximum(a, 1))
            for a, b in (map(np.asarray, pair) for pair in pairs)
        )

    assert difference(calibrate_in_float) < 1e-6
    assert difference(calibrate) > 1e-4


@each
def test_statistics_are_those_of_the_float_model(name):
    model = MODELS[name]
    variables = calibrate_in_float(model, fresh(model), BATCHES)
    params = {"params": variables["params"]}
    _, seen = Mlp(cfg=None, is_lifted=False).apply(
        params, np.concatenate(BATCHES), capture_intermediates=True
    )
    (first,) = seen["intermediates"]["Dense_0"]["__call__"]
    largest = np.abs(np.tanh(first)).max()
    (entry,) = variables["aqt_stats"]["lifted"].values()
    np.testing.assert_allclose(
        entry["lhs"].state["ends"]["high"].max(), largest, rtol=1e-5
    )
    # A call is quantized before and after, also in a module that Flax compiles once.
    outs = model.apply(variables, X), Mlp(cfg=None, is_lifted=False).apply(params, X)
    assert np.any(outs[0] != outs[1])
    after = model.apply(variables, X, mutable=["aqt_stats"])[0]
    assert np.any(after != outs[1])


def test_statistics_go_on_and_methods_are_called():
    model = Mlp()
    variables = fresh(model)
    halves = variables
    for part in (BATCHES[:2], BATCHES[2:]):
        halves = calibrate_in_float(model, halves, part, method="layers")
    wanted = calibrate_in_float(model, variables, BATCHES, method=Mlp.layers)
    assert_same(halves, wanted)


def test_other_arrays_are_floats():
    """Rows of a table, and results."""
    indices = jnp.array([1, 2, 4])
    rows = normal((5, 8))
    dense = {"kernel": normal((8, 4), 1), "bias": jnp.zeros(4)}
    dot_general = AqtDotGeneral(CFG)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, indices):
            x = AqtTake(config.weight_only(bits=2))(rows, indices)
            return nn.Dense(4, dot_general=dot_general)(x)

    variables = init(Model(), indices)
    variables = {**variables, "params": {"Dense_0": dense}}
    found = calibrate_in_float(Model(), variables, [indices])["aqt_stats"]
    (entry,) = found["Dense_0"].values()
    largest = entry["lhs"].state["ends"]["high"].max()
    np.testing.assert_array_equal(largest, np.abs(rows[indices]).max())


class TwoLayers(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = (nnx.Linear(8, 8, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        return self.second(nnx.tanh(self.first(x)))


def test_nnx():
    def calibrated(*parts):
        model = aqt_nnx.quantize_model(TwoLayers(nnx.Rngs(0)), CFG)
        for part in parts:
            aqt_nnx.calibrate_in_float(model, part)
        return model

    one_pass = calibrated(BATCHES)
    assert_same(
        *(
            nnx.to_pure_dict(nnx.state(model, aqt_nnx.Statistics))
            for model in (one_pass, calibrated(BATCHES[2:], BATCHES[:2]))
        )
    )
    assert np.any(one_pass(X) != TwoLayers(nnx.Rngs(0))(X))


def test_functions():
    def mlp(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return x

    params = [normal((8, 8), seed) for seed in range(3)]
    quantized = aqtlite.quantize_function(mlp, [Rule(cfg=CFG)], params=0)

    def gathered(batches):
        state = quantized.init_state(params, X)
        for x in batches:
            state = jax.jit(quantized.gather)(state, params, x)
        return state

    first, second = gathered(BATCHES[:2]), gathered(BATCHES[2:])
    merged = {
        path: statistics.merge_states(CFG, *(statistics.States(**one) for one in pair))
        for path, *pair in (
            (path, one, second["aqt_stats"][path])
            for path, one in first["aqt_stats"].items()
        )
    }
    for path, entry in gathered(BATCHES)["aqt_stats"].items():
        assert_same(merged[path], statistics.States(**entry))


def test_contractions_inside_a_jit_or_a_vmap_of_a_module_run_in_float():
    class Model(nn.Module):
        cfg: config.DotGeneral | None

        @nn.compact
        def __call__(self, x):
            dot_general = AqtDotGeneral(self.cfg)
            dot = partial(jnp.einsum, "i,ij->j", _dot_general=dot_general)
            w = self.param("w", nn.initializers.normal(), (8, 8))
            x = jax.jit(jax.vmap(dot, (0, None)))(x, w)
            return nn.Dense(4, dot_general=AqtDotGeneral(CFG))(x)

    variables = fresh(Model(config.qat(4)))
    assert_same(
        calibrate_in_float(Model(config.qat(4)), variables, [X]),
        calibrate_in_float(Model(None), variables, [X]),
    )
