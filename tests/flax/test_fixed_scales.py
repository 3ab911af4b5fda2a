"""Static ranges in serving: scales that conversion computes once."""

import dataclasses

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import aqtlite.flax.nnx
from aqtlite import calibration, checkpoint, config, numerics
from aqtlite.flax import (
    AqtDotGeneral,
    Call,
    calibrate,
    calibrate_in_float,
    convert,
    quantize_model,
)
from aqtlite.quantization.states.fixed_scale import FixedScale
from aqtlite.testing import assert_served_equals_trained
from tests.checkpoint.support import assert_same, save
from tests.common import normal
from tests.flax.support import apply, assert_equal, init

X = normal((4, 8))
BATCHES = [X, 3 * X]
INT8 = config.static_int8()
AFFINE = config.update(
    INT8,
    {
        "fwd.lhs.numerics": numerics.IntAffine(bits=8),
        "fwd.lhs.calibration": calibration.MeanOverBatches(of=calibration.MinMax()),
    },
)
NOISE = config.update(
    AFFINE, {"fwd.lhs.numerics": numerics.IntAffine(bits=8, stochastic_rounding=True)}
)
OF_WEIGHTS = {
    "fwd.rhs.calibration": calibration.Periodic(),
    "fwd.rhs.calib_shared_axes": (0,),
}


def dense(cfg=INT8):
    return nn.Dense(8, dot_general=AqtDotGeneral(cfg))


def calibrated(model):
    return calibrate(model, init(model, X), BATCHES)


def nodes(serving):
    found = jax.tree.leaves(
        serving["aqt_stats"], is_leaf=lambda node: isinstance(node, FixedScale)
    )
    return [node for node in found if isinstance(node, FixedScale)]


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return nn.relu(dense()(x)), None


class Lifted(nn.Module):
    """Layers whose statistics are stacked."""

    how: str

    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, "aqt": 0, "aqt_stats": 0}
        lift = {"variable_axes": axes, "split_rngs": {"params": True}}
        if self.how == "vmap":
            body = nn.vmap(Layer, **lift, in_axes=0, axis_size=2)
            return body()(jnp.stack([x, 2 * x]))[0]
        return nn.scan(Layer, **lift, length=2)()(x, None)[0]


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (dense(AFFINE), (1, 1)),
        pytest.param(Lifted("stacked"), (2, 1, 1), marks=pytest.mark.slow),
        (Lifted("vmap"), (2, 1, 1)),
    ],
    ids=["zero point", "scan", "vmap"],
)
def test_fixed_and_bit_for_bit(model, shape):
    variables = calibrated(model)
    serving = convert(model, variables, X)
    (fixed,) = nodes(serving)
    assert fixed.scale.shape == shape
    leaves = jax.tree.leaves(serving["aqt_stats"])
    assert len(leaves) == len(jax.tree.leaves(fixed)) <= 2
    assert_served_equals_trained(model, variables, X, serving=serving)
    assert_equal(apply(model, variables, X), apply(model, serving, X))


@config.register
@dataclasses.dataclass(frozen=True)
class AtMostSeen(calibration.MaxOverBatches):
    """The largest magnitude of the array, at most that of the batches before."""

    def range(self, x, axes, grid, state):
        seen = super().range(x, axes, grid, state).high
        return calibration.Range(jnp.minimum(seen, jnp.abs(x).max()))


class Two(nn.Module):
    """Two contractions that share statistics."""

    cfgs: tuple[config.DotGeneral, config.DotGeneral]

    @nn.compact
    def __call__(self, x):
        one, other = (AqtDotGeneral(cfg, name="shared") for cfg in self.cfgs)
        dims = (((1,), (0,)), ((), ()))
        w = self.param("w", nn.initializers.normal(), (8, 8))
        v = self.param("v", nn.initializers.normal(), (8, 8))
        return one(x, w, dims) + other(x, v, dims)


INT4 = config.update(INT8, {"fwd.lhs.numerics": numerics.IntSymmetric(bits=4)})


@pytest.mark.code("quick")
@pytest.mark.parametrize(
    ("model", "is_fixed"),
    [
        (dense(config.update(INT8, {"fwd.lhs.calibration": AtMostSeen()})), False),
        (Two((INT8, INT4)), False),
        (Two((INT8, INT8)), True),
    ],
    ids=["reads the array", "two grids", "one grid"],
)
def test_statistics_that_give_no_single_scale_stay(model, is_fixed):
    variables = calibrated(model)
    serving = convert(model, variables, X)
    assert len(nodes(serving)) == is_fixed
    if not is_fixed:
        assert_same(serving["aqt_stats"], variables["aqt_stats"])
    assert_served_equals_trained(model, variables, X[:2], serving=serving)


def test_what_is_rounded_stochastically_is_fixed_where_it_is_served_nearest():
    model = dense(NOISE)
    variables = calibrated(model)
    serving = convert(model, variables, X)
    assert len(nodes(serving)) == 1
    wanted = apply(dense(NOISE.for_serving()), variables, X)
    assert_equal(apply(model, serving, X), wanted)
    unfrozen = nn.Dense(8, dot_general=AqtDotGeneral(NOISE, frozen_operands="none"))
    assert not nodes(convert(unfrozen, variables, X))


class PerFeature(nn.Module):
    """A scale for each row of a sequence, of which a call may have fewer."""

    @nn.compact
    def __call__(self, x):
        cfg = config.update(INT8, {"fwd.lhs.calib_shared_axes": (1,)})
        return dense(cfg)(x)


@pytest.mark.code("quick")
def test_a_batch_of_another_shape():
    model = PerFeature()
    serving = convert(model, calibrated(model), X)
    with pytest.raises(ValueError, match=r"fwd\.lhs has a fixed scale of shape \(4, 1"):
        model.apply(serving, X[:2])


@pytest.mark.code("quick")
def test_several_calls():
    model = dense()
    serving = convert(model, calibrated(model), calls=[Call(X), Call(X[:1])])
    assert len(nodes(serving)) == 1


@pytest.mark.code("quick")
@pytest.mark.parametrize("model", [dense(), quantize_model(nn.Dense(8), INT8)])
def test_no_more_batches(model):
    serving = convert(model, calibrated(model), X)
    for more in (calibrate, calibrate_in_float):
        with pytest.raises(ValueError, match="no batch can be added"):
            more(model, serving, BATCHES)
    with pytest.raises(ValueError, match="no batch can be added"):
        model.apply(serving, X, mutable=["aqt_stats"])


@pytest.mark.parametrize("mutable", [True, nn.DenyList("params")])
def test_collections_that_are_not_named_stay(mutable):
    model = quantize_model(nn.Dense(8), INT8)
    serving = convert(model, calibrated(model), X)
    out, _ = model.apply(serving, X, mutable=mutable)
    assert (out == model.apply(serving, X)).all()


def test_a_model_of_weights_alone_gathers_nothing_in_nnx():
    linear = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    model = aqtlite.flax.nnx.quantize_model(linear, config.weight_only(8))
    for one in (model, aqtlite.flax.nnx.convert(model, X)):
        with pytest.raises(ValueError, match="no calibration of the model gathers"):
            aqtlite.flax.nnx.calibrate(one, BATCHES)


def test_a_call_that_gathers_in_serving_keeps_what_it_gathers_from():
    model = dense()
    gathering = convert(model, calibrated(model), X, mutable=["aqt_stats"])
    _, changed = model.apply(gathering, X, mutable=["aqt_stats"])
    assert changed["aqt_stats"]["dot_general_ab_bc"]["lhs"].batches == 3


def test_no_more_batches_in_nnx():
    linear = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    model = aqtlite.flax.nnx.quantize_model(linear, INT8)
    aqtlite.flax.nnx.calibrate(model, BATCHES)
    serving = aqtlite.flax.nnx.convert(model, X)
    for more in (aqtlite.flax.nnx.calibrate, aqtlite.flax.nnx.calibrate_in_float):
        with pytest.raises(ValueError, match="no batch can be added"):
            more(serving, BATCHES)


def test_nothing_is_gathered_beside_frozen_weights():
    of_weights = quantize_model(nn.Dense(8), config.weight_only(8))
    frozen = convert(of_weights, init(nn.Dense(8), X), X)
    model = quantize_model(nn.Dense(8), INT8)
    for gather in (calibrate, calibrate_in_float):
        with pytest.raises(ValueError, match="to be gathered, and weights are frozen"):
            gather(model, frozen, BATCHES)


@pytest.mark.code("quick")
@pytest.mark.parametrize("where", ["flax", "orbax", "aqtlite"])
def test_checkpoints(where, tmp_path):
    model = dense(config.update(AFFINE, OF_WEIGHTS))
    variables = calibrated(model)
    serving = convert(model, variables, X)
    target = jax.eval_shape(lambda v: convert(model, v, X), variables)
    if where == "flax":
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), target)
        data = flax.serialization.to_bytes(serving)
        restored = flax.serialization.from_bytes(zeros, data)
    elif where == "orbax":
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "out", serving)
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(tmp_path / "out", target)
    else:
        source = save(tmp_path / "float", variables, "msgpack")
        checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)
        restored = checkpoint.load_serving(tmp_path / "out", model)
        # Without a model, the statistics are those that were gathered.
        raw = checkpoint.load_serving(tmp_path / "out")
        assert_same(raw["aqt_stats"], variables["aqt_stats"])
        assert_equal(apply(model, raw, X), apply(model, variables, X))
    assert_same(restored, serving)


def test_a_result():
    """The statistics of a result that is quantized."""
    cfg = config.update(INT8, {"out": INT8.fwd.lhs})

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.normal(), (8, 8))
            return AqtDotGeneral(cfg)(x, w, (((1,), (0,)), ((), ()))).dequant()

    model = Model()
    variables = calibrated(model)
    serving = convert(model, variables, X)
    assert len(nodes(serving)) == 2
    assert_served_equals_trained(model, variables, X, serving=serving)
