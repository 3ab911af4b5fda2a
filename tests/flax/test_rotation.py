"""Rotated contractions of Flax models: trained, calibrated, converted and served."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aqtlite import calibration, checkpoint, config
from aqtlite.flax import (
    AqtConvGeneralDilated,
    AqtDotGeneral,
    AqtTake,
    calibrate,
    calibrate_in_float,
    convert,
    quantize_model,
)
from aqtlite.flax import nnx as aqtlite_nnx
from aqtlite.testing import assert_served_equals_trained
from tests.checkpoint.support import assert_same, save
from tests.common import normal
from tests.flax.support import apply, init

pytestmark = pytest.mark.code("quick")

ROTATION = {"fwd.rotation": config.Hadamard()}
INT4 = config.update(config.qat(4), ROTATION)
X = normal((4, 24)).at[:, 2].multiply(20)
IMAGES = normal((2, 5, 5, 12))


class Mlp(nn.Module):
    cfg: config.DotGeneral | None

    @nn.compact
    def __call__(self, x):
        dot_general = AqtDotGeneral(self.cfg)
        x = nn.gelu(nn.Dense(24, dot_general=dot_general)(x))
        x = x.reshape(*x.shape[:-1], 3, 8)
        return nn.DenseGeneral(12, axis=(-2, -1), dot_general=dot_general)(x)


class Conv(nn.Module):
    cfg: config.DotGeneral

    @nn.compact
    def __call__(self, x):
        conv = AqtConvGeneralDilated(self.cfg)
        x = nn.Conv(8, (3, 3), conv_general_dilated=conv)(x)
        return nn.Conv(4, (2, 2), feature_group_count=2, conv_general_dilated=conv)(x)


VARIABLES = init(Mlp(None), X)


@pytest.mark.code("users")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fwd.rotation.size": 4, "fwd.rhs.blocks": config.Blocks(size=4)},
        {"fwd.rhs.blocks": config.Blocks(size=16, pad=True)},
        {"fwd.*.use_fake_quant": True},
        {"fwd.rhs.calibration": calibration.MseSearch((1.0, 0.8))},
        {"fwd.rhs.numerics.bits": 8, "fwd.lhs": config.Tensor()},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_served_equals_trained(changes):
    cfg = INT4
    if "fwd.lhs" in changes:
        cfg = config.update(cfg, {"drhs.rhs.use_fwd_quant": False})
    if any("blocks" in path for path in changes):
        cfg = config.update(cfg, {"*.rhs.use_fwd_quant": False})
    assert_served_equals_trained(Mlp(config.update(cfg, changes)), VARIABLES, X)


def test_served_equals_trained_in_bfloat16():
    params = jax.tree.map(lambda x: x.astype("bfloat16"), VARIABLES)
    assert_served_equals_trained(Mlp(INT4), params, X.astype("bfloat16"))


def test_convolutions():
    model = Conv(INT4)
    assert_served_equals_trained(model, init(model, IMAGES), IMAGES)


def test_frozen_weights_are_rotated():
    """Each has the magnitudes of the rotated kernel; its scales are small."""
    kernel = jnp.zeros((24, 5)).at[2].set(1)
    model = nn.Dense(5, use_bias=False, dot_general=AqtDotGeneral(INT4))
    serving = convert(model, {"params": {"kernel": kernel}}, X)
    stored = serving["aqt"]["kernel"]["rhs"].dequant()
    np.testing.assert_allclose(np.abs(stored), 24**-0.5, rtol=0.1)
    assert (apply(model, serving, X) == model.apply(serving, X)).all()


@pytest.mark.slow
@pytest.mark.code("users")
def test_rules_plan_and_warn(caplog):
    float_model = nn.Sequential([nn.Dense(172), nn.Dense(7), nn.Dense(4)])
    model = quantize_model(float_model, INT4)
    with caplog.at_level("WARNING", logger="absl"):
        variables = init(model, X)
        table = str(model.plan(variables, X))
        apply(model, variables, X)
    for text in (
        "int4 x int4, rotated, 24 channels at a time",
        "int4 x int4, rotated, 4 channels at a time",
        "int4 x int4, not rotated: no Hadamard matrix",
    ):
        assert text in table
    # However often it is traced.
    assert caplog.text.count("layers_2' is not rotated: no Hadamard matrix") == 1
    assert_served_equals_trained(model, variables, X)
    sized = quantize_model(float_model, config.update(INT4, {"fwd.rotation.size": 8}))
    with pytest.raises(ValueError, match="layers_1': fwd.rotation.size=8 does not di"):
        sized.plan(variables, X)


def test_scanned_layers():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(24, dot_general=AqtDotGeneral(INT4))(x), None

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes = {"params": 0, "aqt": 0}
            layers = nn.scan(
                nn.remat(Layer), axes, split_rngs={"params": True}, length=3
            )
            return layers()(x, None)[0]

    model = Layers()
    assert_served_equals_trained(model, init(model, X), X)


def test_smoothing_comes_first():
    static = {
        "fwd.smoothing": config.Smoothing(lhs_calibration=calibration.MaxOverBatches()),
        "fwd.lhs.calibration": calibration.MaxOverBatches(),
        "fwd.lhs.calib_shared_axes": "per_tensor",
    }
    model = Mlp(config.update(INT4, static))
    variables = calibrate(model, VARIABLES, [X])
    assert_served_equals_trained(model, variables, X)


class TestGptq:
    CFG = config.update(config.gptq(4, size=8), ROTATION)

    def test_rounds_rotated_weights_by_rotated_inputs(self):
        x = normal((64, 4)) @ normal((4, 24), seed=1) + 0.1 * normal((64, 24), seed=2)
        nearest = Mlp(config.update(self.CFG, {"fwd.rhs.rounding": None}))
        model, exact = Mlp(self.CFG), apply(Mlp(None), VARIABLES, x)
        calibrated = calibrate_in_float(model, VARIABLES, [x[:32], x[32:]])
        errors = [
            jnp.linalg.norm(apply(one, convert(one, of, x), x) - exact)
            for one, of in ((model, calibrated), (nearest, VARIABLES))
        ]
        assert errors[0] < 0.7 * errors[1]


def test_checkpoints(tmp_path):
    model = Mlp(INT4)
    source = save(tmp_path / "float", VARIABLES, "msgpack")
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)
    loaded = checkpoint.load_serving(tmp_path / "out", model)
    assert_same(loaded, convert(model, VARIABLES, X))
    assert_same(apply(model, loaded, X), apply(model, VARIABLES, X))
    other = Mlp(config.update(INT4, {"fwd.rotation.seed": 1}))
    with pytest.raises(ValueError, match=r"fwd\.rotation\.seed"):
        apply(other, loaded, X)


@pytest.mark.code("users")
def test_nnx():
    model = aqtlite_nnx.quantize_model(nnx.Linear(24, 5, rngs=nnx.Rngs(0)), INT4)
    serving = aqtlite_nnx.convert(model, X)
    run = nnx.jit(lambda model, x: model(x))
    np.testing.assert_array_equal(run(serving, X), run(model, X))


def test_tables_of_embeddings_are_refused():
    with pytest.raises(ValueError, match="a lookup would return rotated rows"):
        AqtTake(INT4)(normal((7, 24)), jnp.array([1]))
