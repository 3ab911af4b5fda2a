"""Layers whose results are quantized."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite import QTensor, calibration, config, shape_operations
from aqtlite.flax import AqtDotGeneral, AqtEinsum, calibrate, convert, promote_dtype
from aqtlite.testing import assert_served_equals_trained
from tests.common import left_in_float, nearest, normal, quick_jit, tensor
from tests.flax.support import init


class Chain(nn.Module):
    """Integers from layer to layer, moved and split in between."""

    cfg: config.DotGeneral

    @nn.compact
    def __call__(self, x):
        to_integers = config.update(self.cfg, {"out": tensor(8)})
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (8, 2, 4))
        k = AqtEinsum(to_integers)("btd,dhk->bhtk", x, kernel)
        assert isinstance(k, QTensor) and k.scale.shape == (*k.shape[:3], 1)
        scores = AqtEinsum(self.cfg)("bhtk,bhsk->bhts", k, shape_operations.flip(k, 2))
        mixed = AqtEinsum(to_integers)("bhts,bhsk->bhtk", scores, k.dequant())
        hidden = nn.Dense(
            8, use_bias=False, dot_general=AqtDotGeneral(to_integers), name="hidden"
        )(mixed.dequant().transpose(0, 2, 1, 3).reshape(*x.shape))
        assert isinstance(hidden, QTensor)
        return nn.Dense(
            3,
            dot_general=AqtDotGeneral(self.cfg),
            promote_dtype=promote_dtype,
            name="out",
        )(hidden)


@pytest.mark.slow
def test_trains_and_serves_the_same_integers():
    model, x = Chain(nearest()), normal((2, 3, 8))
    variables = init(model, x)
    assert_served_equals_trained(model, variables, x)
    gradients = quick_jit(jax.grad(lambda v: jnp.sum(model.apply(v, x) ** 2)))(
        variables
    )
    simulated = Chain(config.update(nearest(), {"fwd.*.use_fake_quant": True}))
    exact = quick_jit(jax.grad(lambda v: jnp.sum(simulated.apply(v, x) ** 2)))(
        variables
    )
    for got, wanted in zip(*map(jax.tree.leaves, (gradients, exact)), strict=True):
        assert np.linalg.norm(got - wanted) < 0.1 * np.linalg.norm(wanted)


def test_is_frozen_like_any_other_contraction():
    cfg = config.update(nearest(), {"out": tensor(8)})
    layer = nn.Dense(4, use_bias=False, dot_general=AqtDotGeneral(cfg))
    x = normal((2, 8))
    variables = init(layer, x)
    serving = convert(layer, variables, x)
    assert not left_in_float(serving["params"])
    trained, served = (jax.jit(layer.apply)(v, x) for v in (variables, serving))
    assert isinstance(trained, QTensor)
    np.testing.assert_array_equal(trained.qvalue, served.qvalue)
    np.testing.assert_array_equal(trained.scale, served.scale)
    fake = config.update(cfg, {"out.use_fake_quant": True})
    with_bias = nn.Dense(4, dot_general=AqtDotGeneral(fake))
    bias = {"bias": jnp.arange(4.0), **variables["params"]}
    np.testing.assert_array_equal(
        with_bias.apply({"params": bias}, x), trained.dequant() + jnp.arange(4.0)
    )


class Static(nn.Module):
    cfg: config.DotGeneral

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (8, 4))
        y = AqtEinsum(self.cfg)("bk,kn->nb", x, kernel)
        z = nn.Dense(4, use_bias=False, dot_general=AqtDotGeneral(self.cfg))(x)
        return y, z


def test_statistics_of_results():
    """One collection holds them; served contractions read the same ranges."""
    out = tensor(
        8, calibration=calibration.MaxOverBatches(), calib_shared_axes="per_tensor"
    )
    model, x = Static(config.update(nearest(), {"out": out})), normal((3, 8))
    variables = init(model, x)
    assert set(variables["aqt_stats"]) == {"einsum_bk_kn_nb_out", "Dense_0"}
    with pytest.raises(ValueError, match="no statistics yet"):
        model.apply(variables, x)
    plain = Static(nearest()).apply(variables, x)
    variables = calibrate(model, variables, [x, 2 * x, x])
    serving = convert(model, variables, x)
    trained, served = (jax.jit(model.apply)(v, x) for v in (variables, serving))
    for got, same, wanted in zip(trained, served, plain, strict=True):
        np.testing.assert_array_equal(got.qvalue, same.qvalue)
        np.testing.assert_array_equal(got.scale, same.scale)
        bound = 2 * np.abs(wanted).max()
        np.testing.assert_allclose(got.scale, [[bound / 127.5]], rtol=1e-5)


def test_a_bias_is_refused():
    cfg = config.update(nearest(), {"out": tensor(8)})
    layer = nn.Dense(4, dot_general=AqtDotGeneral(cfg))
    with pytest.raises(TypeError, match=r"\.dequant\(\).*use_bias=False"):
        layer.init(jax.random.key(0), normal((2, 8)))
