"""Layers of one input are exact: of Linen and NNX, injected and by rules."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import aqtlite.flax.nnx
from aqtlite import config
from aqtlite.flax import (
    AqtConvGeneralDilated,
    AqtDotGeneral,
    AqtEinsum,
    calibrate,
    convert,
    quantize_model,
)
from aqtlite.operations import DotGeneral
from aqtlite.program import unsummed
from aqtlite.quantization.states.state_collections import STATISTICS, collections_of
from tests.common import mostly_slow, normal, quick_jit
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

PRESETS = {
    name: preset.make()
    for name, preset in config.presets().items()
    if preset.make().is_quantized and "smoothquant" not in name
}
each_preset = pytest.mark.parametrize(
    "preset", mostly_slow(PRESETS, "fully_quantized", "lsq")
)
TIME = normal((4, 1), 1)
X = normal((4, 16), 2)
IMAGE = normal((2, 3, 3, 4), 3)


class Parts(nn.Module):
    """What has one element to a sum, and what it should give."""

    cfg: config.DotGeneral | None = None

    @nn.compact
    def __call__(self, time, image):
        # A bias would be added to the float product before that is rounded.
        dot_general = AqtDotGeneral(self.cfg)
        layer = nn.Dense(16, use_bias=False, dot_general=dot_general, name="time")
        convolve = AqtConvGeneralDilated(self.cfg)
        depthwise = nn.Conv(
            4,
            (1, 1),
            feature_group_count=4,
            use_bias=False,
            conv_general_dilated=convolve,
            name="depthwise",
        )
        kernel = self.param("kernel", nn.initializers.normal(), (1, 3))
        mixed = AqtEinsum(self.cfg)("bk,kn->bn", time, kernel)
        return layer(time), depthwise(image), mixed


class Model(nn.Module):
    """A layer of the time beside one that is quantized."""

    cfg: config.DotGeneral | None = None

    @nn.compact
    def __call__(self, time, x):
        dot_general = AqtDotGeneral(self.cfg)
        x = x + nn.Dense(16, dot_general=dot_general, name="time")(time)
        return nn.Dense(8, dot_general=dot_general, name="last")(nn.relu(x))


def assert_equal(got, wanted):
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def with_gradients(function):
    def run(*args):
        out, vjp = jax.vjp(function, *args)
        return out, vjp(jax.tree.map(jnp.cos, out))

    return jax.jit(run)


def applied(model, variables):
    """A model as a function of its parameters and inputs."""
    others = {name: x for name, x in variables.items() if name != "params"}

    def apply(params, *args):
        return model.apply({**others, "params": params}, *args)

    return with_gradients(apply)


IN_FLOAT = applied(Parts(), {})


@each_preset
def test_linen(preset):
    """No variable but parameters, and the results of the float layers."""
    model, args = Parts(PRESETS[preset]), (TIME, IMAGE)
    variables = init(model, *args)
    assert set(variables) == {"params"}
    assert set(variables["params"]) == {"time", "depthwise", "kernel"}
    params = variables["params"]
    got = applied(model, variables)(params, *args)
    out, gradients = IN_FLOAT(params, *args)
    assert_equal(got[0], out)
    for one, other in zip(*map(jax.tree.leaves, (got[1], gradients)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    by_rules = quantize_model(Parts(), PRESETS[preset], strict=True)
    made = jax.eval_shape(by_rules.init, jax.random.key(0), *args)
    assert set(made) == {"params"}
    assert_equal(applied(by_rules, variables)(params, *args), (out, gradients))


def gathered(model, variables, *args):
    """Variables with statistics, if the model has any."""
    if STATISTICS not in variables:
        return variables
    return calibrate(model, variables, [args])


@each_preset
@pytest.mark.parametrize("by_rules", [False, True], ids=["injected", "rules"])
def test_linen_is_served_as_trained(preset, by_rules):
    cfg, args = PRESETS[preset], (TIME, X)
    model = quantize_model(Model(), cfg, strict=True) if by_rules else Model(cfg)
    variables = quick_jit(model.init)(jax.random.key(0), *args)
    variables = gathered(model, variables, *args)
    for collection in set(variables) - {"params"}:
        assert set(variables[collection]) == {"last"}
    reports = []
    serving = convert(model, variables, *args, strict=True, report=reports.append)
    assert set(serving["aqt"]) == {"last"}
    why = {one.path: one.why for one in reports[0].parameters}
    assert unsummed.SUMS_ONE in why["time/kernel"]
    assert why["last/kernel"] == ""
    # Served with the weights that GPTQ rounded, or those of training.
    if cfg.fwd.rhs.rounding is None:
        trained = jax.jit(model.apply)(variables, *args)
        assert_equal(jax.jit(model.apply)(serving, *args), trained)


def test_a_model_of_such_layers_converts():
    """There is nothing to freeze, and that is told."""
    model, reports = Parts(PRESETS["fully_quantized"]), []
    variables = init(model, TIME, IMAGE)
    serving = convert(model, variables, TIME, IMAGE, report=reports.append)
    assert_equal(serving["params"], variables["params"])
    assert not reports[0].stayed_float
    assert all(unsummed.SUMS_ONE in one.why for one in reports[0].parameters)


def test_a_weight_frozen_by_an_earlier_version_serves(monkeypatch):
    """As it was frozen, and dequantized."""
    model, args = Model(config.weight_only()), (TIME, X)
    variables = init(model, *args)
    with monkeypatch.context() as earlier:
        earlier.setattr(DotGeneral, "sums_one", lambda *_: False)
        serving = convert(model, variables, *args)
    weight = serving["aqt"]["time"]["kernel"]["rhs"]
    assert weight.qvalue.dtype == jnp.int8
    params = variables["params"]
    rounded = {**params["time"], "kernel": weight.dequant()}
    exact = model.apply({"params": {**params, "time": rounded}}, *args)
    assert_equal(model.apply(serving, *args), exact)


class Nnx(nnx.Module):
    """The parts of `Parts`, and a layer that is quantized."""

    def __init__(self, cfg=None, **kwargs):
        rngs = nnx.Rngs(0)
        self.time = nnx.Linear(1, 16, rngs=rngs, **kwargs)
        self.last = nnx.Linear(16, 8, rngs=rngs, **kwargs)

    def __call__(self, time, x):
        return self.last(nnx.relu(x + self.time(time)))


@pytest.mark.parametrize("preset", ["fully_quantized", "lsq"])
@pytest.mark.parametrize("by_rules", [False, True], ids=["injected", "rules"])
def test_nnx(preset, by_rules):
    """Exact in the quantized model; served as trained, with one weight frozen."""
    cfg = PRESETS[preset]
    given = {} if by_rules else {"dot_general": aqtlite.flax.nnx.AqtDotGeneral(cfg)}
    rules = cfg if by_rules else ()
    model = aqtlite.flax.nnx.quantize_model(Nnx(**given), rules, strict=True)
    plan = aqtlite.flax.nnx.plan(model, TIME, X)
    assert [one.why_float for one in plan.contractions] == [unsummed.SUMS_ONE, None]
    reports = []
    aqtlite.flax.nnx.init_state(model, TIME, X)
    if STATISTICS in collections_of(cfg):
        aqtlite.flax.nnx.calibrate(model, [(TIME, X)])
    serving = aqtlite.flax.nnx.convert(
        model, TIME, X, strict=True, report=reports.append
    )
    why = {one.path: one.why for one in reports[0].parameters}
    assert why["time/kernel"] == unsummed.SUMS_ONE
    assert why["last/kernel"] == ""
    if cfg.fwd.rhs.rounding is None:
        call = nnx.jit(lambda model, *args: model(*args))
        assert_equal(call(serving, TIME, X), call(model, TIME, X))


@each_preset
def test_an_nnx_layer_alone(preset):
    """Outside of a quantized model, where calibrations have no variables to keep."""
    dot_general = aqtlite.flax.nnx.AqtDotGeneral(PRESETS[preset])
    layer = nnx.Linear(1, 16, dot_general=dot_general, rngs=nnx.Rngs(0))
    exact = nnx.Linear(1, 16, rngs=nnx.Rngs(0))
    assert_equal(layer(TIME), exact(TIME))
