"""Convolutions in Flax layers: trained, calibrated, converted and served."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from aqtlite import calibration, checkpoint, config
from aqtlite.flax import AqtConvGeneralDilated, AqtDotGeneral, calibrate, convert
from tests.checkpoint.support import save
from tests.common import nearest, normal, rms_error
from tests.flax.support import apply, assert_equal, check_served, init

X = normal((4, 8, 8, 3))


class Cnn(nn.Module):
    """Convolutions with strides, depthwise, and into a classifier."""

    cfg: config.DotGeneral | None

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(
            nn.Conv,
            conv_general_dilated_cls=functools.partial(AqtConvGeneralDilated, self.cfg),
        )
        x = conv(8, (3, 3), strides=2)(x)
        x = nn.BatchNorm(use_running_average=True)(x)
        x = conv(8, (3, 3), feature_group_count=8, use_bias=False)(nn.gelu(x))
        x = nn.gelu(x).mean((1, 2))
        return nn.Dense(4, dot_general=AqtDotGeneral(self.cfg))(x)


def layer(cfg):
    return nn.Conv(4, (3, 3), conv_general_dilated=AqtConvGeneralDilated(cfg))


def gradients_of(model, variables):
    def loss(params):
        return (model.apply({**variables, "params": params}, X) ** 2).sum()

    return jax.jit(jax.grad(loss))(variables["params"])


def test_served_equals_trained():
    serving = check_served(Cnn(config.fully_quantized()), X, frozen=3)
    kernel = serving["aqt"]["Conv_0"]["kernel"]["rhs"]
    assert kernel.qvalue.dtype == jnp.int8
    assert kernel.order == (3, 0, 1, 2) and kernel.scale.size == 8


@pytest.mark.code("quick")
def test_gradients_are_those_of_floats():
    model = layer(nearest())
    variables = init(model, X)
    got, wanted = (gradients_of(one, variables) for one in (model, layer(None)))
    for a, b in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        assert rms_error(a, b) < 0.02


@pytest.mark.parametrize("cfg", [config.weight_only(), config.fp8()])
def test_served_equals_trained_in_other_arithmetic(cfg):
    check_served(layer(cfg), X, frozen=1)


def test_static_ranges():
    model = layer(config.static_int8(calibration.MaxOverBatches()))
    variables = calibrate(model, init(model, X), [X, 2 * X])
    (name,) = variables["aqt_stats"]
    assert name.startswith("conv_general_dilated")
    serving = check_served(model, X, frozen=1, variables=variables)
    assert not any("batches" in str(path) for path, _ in _leaves(serving["aqt_stats"]))


def _leaves(tree):
    return jax.tree.leaves_with_path(tree)


def test_learned_scales():
    model = layer(config.lsq())
    variables = init(model, X)
    (name,) = [name for name in variables["params"] if "aqt" in name]
    scales = gradients_of(model, variables)[name]
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(scales))
    check_served(model, X, variables=variables)


@pytest.mark.code("quick")
def test_converted_on_disk(tmp_path):
    model = layer(config.fully_quantized())
    variables = init(model, X)
    source = save(tmp_path / "float", variables, "msgpack")
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)
    loaded = checkpoint.load_serving(tmp_path / "out", model)
    assert_equal(apply(model, convert(model, variables, X), X), apply(model, loaded, X))


def test_a_transposed_convolution_is_one_with_dilated_input():
    """As the documentation says: `nn.ConvTranspose` takes no function."""
    padding = [(2, 2), (2, 1)]
    conv = functools.partial(nn.Conv, 4, (3, 4), input_dilation=2, padding=padding)
    model = conv(conv_general_dilated=AqtConvGeneralDilated(config.fully_quantized()))
    variables = init(model, X)
    transposed = nn.ConvTranspose(4, (3, 4), strides=(2, 2), padding="VALID")
    wanted = transposed.apply(variables, X)
    np.testing.assert_allclose(
        conv(padding=_padding((3, 4), (2, 2))).apply(variables, X), wanted, atol=1e-5
    )
    check_served(model, X, frozen=1)


def _padding(kernel, strides):
    return [
        (k - 1, k - 1 + max(s - k, 0)) for k, s in zip(kernel, strides, strict=True)
    ]


def test_conv_local_is_refused():
    conv = AqtConvGeneralDilated(config.fully_quantized())
    model = nn.ConvLocal(4, (3, 3), conv_general_dilated=conv)
    with pytest.raises(ValueError, match=r"nn\.ConvLocal.*compute in float"):
        jax.eval_shape(model.init, jax.random.key(0), X)


def test_smoothing_is_refused():
    with pytest.raises(ValueError, match="smoothing"):
        jax.eval_shape(layer(config.smoothquant()).init, jax.random.key(0), X)
