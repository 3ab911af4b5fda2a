"""Weights of Flax models that GPTQ rounds at conversion, and their statistics."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from aqtlite import checkpoint, config
from aqtlite.flax import (
    AqtDotGeneral,
    AqtTake,
    calibrate,
    calibrate_in_float,
    convert,
    merge_statistics,
    quantize_model,
)
from aqtlite.flax import nnx as aqtlite_nnx
from tests.checkpoint.support import assert_same, save
from tests.common import normal
from tests.flax.models import Mlp
from tests.flax.support import apply, init

pytestmark = pytest.mark.code("quick")

CFG = config.gptq(bits=4, size=8)
NEAREST = config.update(CFG, {"fwd.rhs.rounding": None})
# Each input is a mixture of four numbers.
X = normal((64, 4)) @ normal((4, 16), seed=1) + 0.1 * normal((64, 16), seed=2)
BATCHES = [X[:32], X[32:]]


VARIABLES = init(Mlp(None), X)
MODEL = Mlp(CFG)


@pytest.fixture(scope="module")
def calibrated():
    return calibrate_in_float(MODEL, VARIABLES, BATCHES)


@pytest.fixture(scope="module")
def serving(calibrated):
    return convert(MODEL, calibrated, X)


def integers(serving):
    return [np.asarray(x) for x in jax.tree.leaves(serving["aqt"])]


def test_outputs_are_nearer_than_those_of_nearest_weights(serving):
    exact = apply(Mlp(None), VARIABLES, X)
    nearest = apply(Mlp(NEAREST), convert(Mlp(NEAREST), VARIABLES, X), X)
    error = jnp.linalg.norm(apply(MODEL, serving, X) - exact)
    assert error < 0.7 * jnp.linalg.norm(nearest - exact)


@pytest.mark.slow
@pytest.mark.code("users")
def test_served_alike_in_every_program(serving):
    assert (apply(MODEL, serving, X) == MODEL.apply(serving, X)).all()
    assert set(serving) == {"params", "aqt"}


def test_models_that_are_not_converted_round_to_nearest(calibrated):
    wanted = apply(Mlp(NEAREST), VARIABLES, X)
    assert (apply(MODEL, VARIABLES, X) == wanted).all()
    assert (apply(MODEL, calibrated, X) == wanted).all()


def test_quantized_by_rules(serving):
    model = quantize_model(Mlp(None), CFG)
    variables = calibrate_in_float(model, VARIABLES, BATCHES)
    by_rules = convert(model, variables, X)
    assert_same(integers(by_rules), integers(serving))
    assert (apply(model, by_rules, X) == apply(MODEL, serving, X)).all()
    assert "rounded by GPTQ at conversion" in repr(model.plan(VARIABLES, X))


def test_nnx_models():
    plain = nnx.Sequential(
        nnx.Linear(16, 24, rngs=nnx.Rngs(0)),
        nnx.relu,
        nnx.Linear(24, 8, rngs=nnx.Rngs(1)),
    )
    exact = plain(X)
    errors = []
    for cfg in (CFG, NEAREST):
        model = aqtlite_nnx.quantize_model(plain, cfg)
        if cfg is CFG:
            aqtlite_nnx.calibrate_in_float(model, BATCHES)
        reports = []
        served = aqtlite_nnx.convert(model, X, report=reports.append)
        assert ("GPTQ" in str(reports[0])) == (cfg is CFG)
        assert not jax.tree.leaves(nnx.state(served, aqtlite_nnx.Statistics))
        errors.append(jnp.linalg.norm(nnx.jit(lambda m, x: m(x))(served, X) - exact))
    assert errors[0] < 0.7 * errors[1]


def test_checkpoints(serving, tmp_path):
    source = save(tmp_path / "float", VARIABLES, "msgpack")
    target = tmp_path / "out"
    report = checkpoint.convert_checkpoint(source, target, MODEL, X, calibrate=BATCHES)
    floats = jax.tree.leaves(VARIABLES["params"])
    assert report.bytes_before == sum(x.nbytes for x in floats)
    assert not list(target.glob("*moment*"))
    loaded = checkpoint.load_serving(target, MODEL)
    assert_same(loaded, serving)


class NnxMlp(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up, self.down = nnx.Linear(16, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


@pytest.mark.slow
def test_checkpoints_of_nnx_models(tmp_path):
    source, target = tmp_path / "float", tmp_path / "out"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(source, nnx.state(NnxMlp()))
    model = aqtlite_nnx.quantize_model(NnxMlp(), CFG)
    checkpoint.convert_checkpoint(source, target, model, X, calibrate=BATCHES)
    assert not list(target.glob("*moment*"))
    aqtlite_nnx.calibrate_in_float(model, BATCHES)
    wanted = nnx.state(aqtlite_nnx.convert(model, X))
    fresh = aqtlite_nnx.quantize_model(NnxMlp(), CFG)
    assert_same(nnx.state(checkpoint.load_serving(target, fresh)), wanted)


def test_statistics_of_two_hosts(calibrated):
    one, other = (calibrate_in_float(MODEL, VARIABLES, [x]) for x in BATCHES)
    merged = merge_statistics(MODEL, one, [other], X)
    for a, b in zip(
        jax.tree.leaves(merged["aqt_stats"]),
        jax.tree.leaves(calibrated["aqt_stats"]),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


def test_floats_that_change_beside_frozen_weights_are_noticed():
    class Tied(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel = self.param("kernel", nn.initializers.normal(), (16, 16))
            out = AqtDotGeneral(CFG)(x, kernel, (((1,), (0,)), ((), ())))
            return out + kernel.sum()

    variables = init(Tied(), X)
    serving = convert(Tied(), calibrate(Tied(), variables, BATCHES), X)
    assert jnp.isfinite(apply(Tied(), serving, X)).all()
    changed = {**serving, "params": jax.tree.map(lambda x: x + 1, serving["params"])}
    assert jnp.isnan(apply(Tied(), changed, X)).all()
    with pytest.raises(ValueError, match="has other values now"):
        Tied().apply(changed, X)


@pytest.mark.slow
def test_layers_of_a_scan():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(16, dot_general=AqtDotGeneral(CFG))(x), None

    class Layers(nn.Module):
        lifted: bool = True

        @nn.compact
        def __call__(self, x):
            axes = {"params": 0, "aqt": 0} | ({"aqt_stats": 0} if self.lifted else {})
            layers = nn.scan(
                Layer, variable_axes=axes, split_rngs={"params": True}, length=2
            )
            return layers()(x, None)[0]

    variables = init(Layers(False), X)
    serving = convert(Layers(), calibrate(Layers(), variables, BATCHES), X)
    first = nn.Dense(16, dot_general=AqtDotGeneral(CFG))
    own = {
        "params": jax.tree.map(
            lambda x: x[0], variables["params"]["ScanLayer_0"]["Dense_0"]
        )
    }
    alone = convert(first, calibrate(first, own, BATCHES), X)
    q = serving["aqt"]["ScanLayer_0"]["Dense_0"]["kernel"]["rhs"]
    assert (q.qvalue[0] == alone["aqt"]["kernel"]["rhs"].qvalue).all()
    assert jnp.isfinite(apply(Layers(), serving, X)).all()


def test_tables_have_no_inputs():
    class Table(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            table = self.param("table", nn.initializers.normal(), (16, 8))
            return AqtTake(CFG)(table, tokens)

    with pytest.raises(ValueError, match="a lookup has none"):
        init(Table(), jnp.arange(4))


def test_statistics_are_needed():
    with pytest.raises(ValueError, match=r"no statistics: gather some.*calibrate"):
        convert(MODEL, VARIABLES, X)
    fresh = init(MODEL, X)
    with pytest.raises(ValueError, match="have seen no batch"):
        convert(MODEL, fresh, X)
