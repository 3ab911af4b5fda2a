"""BatchNorm folded into the layer in front of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from aqtlite import Rule, calibration, config
from aqtlite.flax import (
    AqtConvGeneralDilated,
    convert,
    fold_batch_norm,
    quantize_model,
)
from tests.common import normal
from tests.flax.support import apply, init

pytestmark = pytest.mark.code("quick")

X = normal((4, 6, 6, 3))
LAYERS = {"BatchNorm_0": "Conv_0", "BatchNorm_1": "Conv_1"}


class Model(nn.Module):
    """Two convolutions with a BatchNorm each, one of them without a bias."""

    cfg: config.DotGeneral | None
    affine: bool = True

    @nn.compact
    def __call__(self, x):
        conv = AqtConvGeneralDilated(self.cfg)
        for use_bias in (True, False):
            x = nn.Conv(5, (3, 3), use_bias=use_bias, conv_general_dilated=conv)(x)
            x = nn.BatchNorm(
                use_running_average=True, use_scale=self.affine, use_bias=self.affine
            )(x)
            x = nn.relu(x)
        return x


def variables_of(model):
    """Variables with statistics as of training."""
    variables = init(model, X)
    rng = np.random.default_rng(0)
    for norm in LAYERS:
        variables["batch_stats"][norm] = {
            "mean": jnp.asarray(rng.normal(size=5), jnp.float32),
            "var": jnp.asarray(rng.uniform(0.2, 3, 5), jnp.float32),
        }
    return variables


@pytest.mark.parametrize("affine", [True, False])
def test_float_results_are_the_same(affine):
    model = Model(None, affine)
    variables = variables_of(model)
    folded = fold_batch_norm(variables, LAYERS)
    wanted = apply(model, variables, X)
    np.testing.assert_allclose(apply(model, folded, X), wanted, atol=2e-5)
    # The BatchNorm behind a layer with a bias has nothing left to do.
    norm = folded["params"].get("BatchNorm_0", {"bias": jnp.zeros(5)})
    assert not norm["bias"].any()
    assert not folded["batch_stats"]["BatchNorm_0"]["mean"].any()
    before, after = (x["params"]["Conv_0"]["kernel"] for x in (variables, folded))
    assert (before != after).all()


def test_the_integers_are_the_same_and_the_scale_has_the_factor():
    model = Model(config.fully_quantized())
    variables = variables_of(model)
    variables["params"]["BatchNorm_0"]["scale"] = jnp.asarray([1.0, 2, 0.5, 4, 1])
    variables["batch_stats"]["BatchNorm_0"]["var"] = jnp.full(5, 1 - 1e-5)
    folded = fold_batch_norm(variables, LAYERS)
    before, after = (
        convert(model, one, X)["aqt"]["Conv_0"]["kernel"]["rhs"]
        for one in (variables, folded)
    )
    np.testing.assert_array_equal(before.qvalue, after.qvalue)
    factor = jnp.asarray([1.0, 2, 0.5, 4, 1])[:, None, None, None]
    np.testing.assert_array_equal(after.scale, before.scale * factor)


def _without_statistics(variables):
    del variables["batch_stats"]


def _without_kernel(variables):
    del variables["params"]["Conv_0"]["kernel"]


def _another_size(variables):
    variables["batch_stats"]["BatchNorm_0"]["mean"] = jnp.zeros(4)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_without_statistics, "no running mean and variance"),
        (_without_kernel, "not a layer with a kernel"),
        (_another_size, r"features of shape \(4,\)"),
    ],
)
def test_what_cannot_be_folded(change, match):
    variables = variables_of(Model(None))
    change(variables)
    with pytest.raises(ValueError, match=match):
        fold_batch_norm(variables, LAYERS)


def test_bad_layers():
    variables = variables_of(Model(None))
    with pytest.raises(TypeError, match="takes a mapping"):
        fold_batch_norm(variables, ["Conv_0"])
    with pytest.raises(TypeError, match="takes a mapping"):
        fold_batch_norm(variables, {"BatchNorm_0": ("Conv_0",)})
    with pytest.raises(ValueError, match="names a layer twice"):
        fold_batch_norm(variables, {"BatchNorm_0": "Conv_0", "BatchNorm_1": "Conv_0"})


@pytest.mark.parametrize("epsilon", [np.nan, np.inf, -1e-3, 1.5, 1e10])
def test_epsilons_that_no_batch_norm_has(epsilon):
    """Nothing is searched that cannot be found."""
    with pytest.raises(ValueError, match=r"epsilon=.* has to be from 0 to 1"):
        fold_batch_norm(variables_of(Model(None)), LAYERS, epsilon=epsilon)


@pytest.mark.parametrize("epsilon", [0, 1e-40, 1e-12, 1e-3, 0.3, 0.999, 1.0])
def test_every_epsilon_becomes_one(epsilon):
    folded = fold_batch_norm(variables_of(Model(None)), LAYERS, epsilon=epsilon)
    var = np.asarray(folded["batch_stats"]["BatchNorm_0"]["var"])
    assert (var + np.float32(epsilon) == 1).all()


def test_an_adapter_is_named():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.BatchNorm(use_running_average=True)(nn.Dense(4, name="dense")(x))

    rule = Rule(cfg=config.weight_only(8), adapter=config.Lora(rank=2, alpha=4))
    model = quantize_model(Net(), [rule])
    variables = model.init(jax.random.key(0), X)
    with pytest.raises(
        ValueError, match="'dense' has an adapter, aqt_.*merge_adapters"
    ):
        fold_batch_norm(variables, {"BatchNorm_0": "dense"})


def abstract(cfg):
    """Variables without values, which take no time to make."""
    return jax.eval_shape(Model(cfg).init, jax.random.key(0), X)


def test_what_was_made_for_the_kernel_as_it_is():
    def convert_model(variables):
        return convert(Model(config.fully_quantized()), variables, X)

    serving = jax.eval_shape(convert_model, abstract(None))
    with pytest.raises(ValueError, match="is frozen; fold before convert"):
        fold_batch_norm(serving, LAYERS)
    with pytest.raises(ValueError, match="learned parameters"):
        fold_batch_norm(abstract(config.lsq()), LAYERS)
    changes = {
        "fwd.rhs.calibration": calibration.MaxOverBatches(),
        "fwd.rhs.calib_shared_axes": "per_tensor",
    }
    cfg = config.update(config.fully_quantized(), changes)
    with pytest.raises(ValueError, match="statistics .* of its kernel"):
        fold_batch_norm(abstract(cfg), LAYERS)


def test_a_normalized_kernel():
    """It undoes a factor."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.WeightNorm(nn.Dense(5, name="dense"))(x)
            return nn.BatchNorm(use_running_average=True)(x)

    variables = jax.eval_shape(Net().init, jax.random.key(0), X)
    with pytest.raises(ValueError, match="'WeightNorm_0' normalizes the kernel of 'de"):
        fold_batch_norm(variables, {"BatchNorm_0": "dense"})
