"""Frozen weights beside activations with a zero point."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import serialization

from aqtlite import calibration, checkpoint, config, numerics
from aqtlite.flax import AqtDotGeneral, calibrate, convert
from tests.checkpoint.support import save
from tests.common import normal
from tests.flax.support import apply, assert_equal, check_served, init

pytestmark = pytest.mark.code("quick")

X = jnp.abs(normal((4, 16)))
UINT8 = config.Tensor(numerics=numerics.IntAffine(), calibration=calibration.MinMax())
STATIC = config.Tensor(
    numerics=numerics.IntAffine(),
    calibration=calibration.MaxOverBatches(of=calibration.MinMax()),
    calib_shared_axes="per_tensor",
)
INT8 = config.Tensor(numerics=numerics.IntSymmetric(bits=8))


def model_of(lhs, rhs):
    cfg = config.DotGeneral(fwd=config.DotGeneralRaw(lhs=lhs, rhs=rhs))
    kernel_init = nn.with_partitioning(nn.initializers.normal(), ("in", "out"))
    return nn.Dense(8, dot_general=AqtDotGeneral(cfg), kernel_init=kernel_init)


@pytest.mark.code("users")
@pytest.mark.parametrize("rhs", [INT8, UINT8], ids=["symmetric", "affine"])
def test_its_sums_are_frozen_with_a_weight(rhs):
    model = model_of(UINT8, rhs)
    variables = init(model, X)
    serving = check_served(model, X, frozen=1, variables=variables)
    weight = nn.meta.unbox(serving["aqt"]["kernel"]["rhs"])
    stored = weight.qvalue.astype(jnp.int32)
    if weight.zero_point is not None:
        stored = stored - weight.zero_point
    np.testing.assert_array_equal(weight.sums, stored.sum(1, keepdims=True))
    specs = nn.get_partition_spec(serving)["aqt"]["kernel"]["rhs"]
    assert tuple(specs.sums) == ("out", None)
    restored = serialization.from_bytes(serving, serialization.to_bytes(serving))
    assert_equal(apply(model, serving, X), apply(model, restored, X))
    assert "sums=int32[8,1]" in repr(weight)
    assert weight.T.sums is None and weight[:4].sums is None


def test_serving_adds_up_neither_operand():
    model = model_of(STATIC, INT8)
    variables = calibrate(model, nn.meta.unbox(init(model, X)), [X])
    serving = convert(model, variables, X)
    assert_equal(apply(model, variables, X), apply(model, serving, X))
    jaxpr = jax.make_jaxpr(model.apply)(serving, X)
    assert "reduce_sum" not in str(jaxpr) and "reduce_max" not in str(jaxpr)
    assert "reduce_sum" in str(jax.make_jaxpr(model.apply)(variables, X))


def test_on_disk(tmp_path):
    model = model_of(UINT8, INT8)
    variables = nn.meta.unbox(init(model, X))
    source = save(tmp_path / "float", variables, "msgpack")
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)
    loaded = checkpoint.load_serving(tmp_path / "out", model)
    weight = nn.meta.unbox(loaded["aqt"]["kernel"]["rhs"])
    assert weight.sums.shape == (8, 1)
    assert_equal(apply(model, convert(model, variables, X), X), apply(model, loaded, X))


def test_symmetric_activations_need_none():
    serving = convert(model_of(INT8, UINT8), init(model_of(INT8, UINT8), X), X)
    assert nn.meta.unbox(serving["aqt"]["kernel"]["rhs"]).sums is None


@pytest.mark.parametrize("features", [1, 4])
def test_gradients_through_a_frozen_weight(features):
    """Its sums are not over the axes that a backward contraction sums over."""
    backward = config.DotGeneralRaw(
        lhs=UINT8, rhs=config.Tensor(numerics=INT8.numerics, use_fwd_quant=True)
    )
    cfg = config.DotGeneral(
        fwd=config.DotGeneralRaw(lhs=UINT8, rhs=INT8), dlhs=backward
    )
    model = nn.Dense(features, dot_general=AqtDotGeneral(cfg))
    variables = init(model, X)
    serving = convert(model, variables, X)

    @jax.jit
    def gradient(variables):
        return jax.grad(lambda x: (model.apply(variables, x) ** 2).sum())(X)

    np.testing.assert_array_equal(gradient(variables), gradient(serving))
