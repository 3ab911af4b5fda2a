"""Forward operands that are rounded stochastically, in training and in serving.

Data and keys are fixed, so that a test either always passes or always fails.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import aqtlite
from aqtlite import calibration, checkpoint, config, noise, numerics
from aqtlite.flax import AqtDotGeneral, AqtEinsum, QuantMode, convert
from tests.common import MATMUL, assert_same, normal, tensor
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

NOISY = tensor(4, grid={"preserve_max_val": True, "stochastic_rounding": True})
AFFINE = config.Tensor(
    numerics=numerics.IntAffine(bits=4, stochastic_rounding=True),
    calibration=calibration.MinMax(),
)
REUSED = config.DotGeneralRaw(lhs=NOISY, rhs=config.Tensor(use_fwd_quant=True))
BOTH = config.DotGeneral(
    fwd=config.DotGeneralRaw(lhs=NOISY, rhs=NOISY), dlhs=REUSED, drhs=REUSED
)
EYE, X, W, G = jnp.eye(16), normal((16, 16)), normal((16, 16), 1), normal((16, 16), 2)


def matmul(cfg, lhs, rhs, key=None):
    return aqtlite.make_dot_general(cfg)(lhs, rhs, MATMUL, key=key)


@functools.partial(jax.jit, static_argnums=0)
def rounded(cfg, lhs, rhs, key=None):
    """The rounded operands themselves: products with the identity are exact."""
    return matmul(cfg, lhs, EYE, key), matmul(cfg, EYE, rhs, key)


def test_both_operands_are_unbiased_and_have_noise_of_their_own():
    keys = jax.random.split(jax.random.key(0), 1000)
    lhs, rhs = jax.vmap(lambda key: rounded(BOTH, X, X.T, key))(keys)
    lhs, rhs = np.asarray(lhs, np.float64), np.asarray(rhs, np.float64).swapaxes(1, 2)
    for one in (lhs, rhs):
        z = (one.mean(0) - X) / (one.std(0) / np.sqrt(1000) + 1e-3)
        assert np.abs(z).max() < 5
        assert (one.std(0) > 0).mean() > 0.9
    product = (lhs - lhs.mean(0)) * (rhs - rhs.mean(0))
    z = product.mean(0) / (product.std(0) / np.sqrt(1000) + 1e-9)
    assert np.abs(z).max() < 5
    assert abs(product.sum() / np.sqrt((product**2).sum())) < 5


def test_without_a_key_noise_follows_the_values_and_the_operand():
    lhs, rhs = rounded(BOTH, X, X.T)
    assert_same((lhs, rhs), rounded(BOTH, X, X.T))
    assert np.mean(np.asarray(lhs) != np.asarray(rhs.T)) > 0.2
    # The values of another step.
    moved = X * (1 + 2.0**-20)
    for one, other in zip((lhs, rhs), rounded(BOTH, moved, moved.T), strict=True):
        assert np.mean(~np.isclose(one, other, rtol=1e-4)) > 0.2


def test_backward_contractions_take_the_rounded_integers():
    lhs, rhs = rounded(BOTH, X, W, key := jax.random.key(3))
    exact = config.DotGeneralRaw(rhs=config.Tensor(use_fwd_quant=True))
    cfg = dataclasses.replace(BOTH, dlhs=exact, drhs=exact)
    _, vjp = jax.vjp(lambda x, w: matmul(cfg, x, w, key), X, W)
    for got, wanted in zip(vjp(G), (G @ rhs.T, lhs.T @ G), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_operands_of_gradients_that_are_quantized_afresh_have_noise_of_their_own():
    raw = config.DotGeneralRaw(rhs=NOISY)
    cfg = config.DotGeneral(fwd=raw, dlhs=raw, drhs=raw)
    out, vjp = jax.vjp(lambda x, w: matmul(cfg, x, w), EYE, X)
    dlhs, _ = vjp(EYE)
    assert np.mean(np.asarray(out) != np.asarray(dlhs.T)) > 0.2
    np.testing.assert_allclose(dlhs.T, X, atol=0.5)


@pytest.mark.code("users")
@pytest.mark.parametrize(
    "with_key", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_remat_rounds_to_the_same_integers(with_key):
    key = jax.random.key(0) if with_key else None

    def loss(wrap, x, w):
        return jnp.sum(jnp.sin(wrap(functools.partial(matmul, BOTH, key=key))(x, w)))

    remat = functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable
    )
    wanted, got = (
        jax.jit(jax.value_and_grad(functools.partial(loss, wrap), (0, 1)))(X, W)
        for wrap in (lambda function: function, remat)
    )
    assert_same(got, wanted)


class Model(nn.Module):
    """Weights, and a contraction of activations alone."""

    cfg: config.DotGeneral
    quant_mode: QuantMode | None = None

    @nn.compact
    def __call__(self, x):
        dot = AqtDotGeneral(self.cfg, self.quant_mode)
        x = nn.Dense(12, dot_general=dot)(x)
        einsum = AqtEinsum(self.cfg, self.quant_mode, frozen_operands="none")
        x = einsum("ab,cb->ac", x, x)
        return nn.Dense(3, dot_general=dot)(x)


CFG = dataclasses.replace(BOTH, fwd=config.DotGeneralRaw(lhs=AFFINE, rhs=NOISY))
STOCHASTIC, NEAREST = Model(CFG), Model(CFG.for_serving())


@pytest.fixture(scope="module")
def variables():
    return init(NEAREST, X)


@pytest.fixture(scope="module")
def serving(variables):
    return convert(STOCHASTIC, variables, X)


@pytest.fixture(scope="module")
def wanted(variables):
    """What the model gives that rounds to nearest."""
    return apply(NEAREST, variables, X)


@functools.partial(jax.jit, static_argnums=0)
def apply(model, variables, x, key=None):
    return model.apply(variables, x, rngs=None if key is None else {"aqt": key})


@pytest.mark.slow
@pytest.mark.code("users")
def test_is_served_rounded_to_nearest(variables, serving, wanted):
    q = serving["aqt"]["Dense_0"]["kernel"]["rhs"]
    assert q.numerics == NOISY.to_nearest().numerics
    for model in (STOCHASTIC, NEAREST, Model(CFG, QuantMode.SERVE)):
        np.testing.assert_array_equal(apply(model, serving, X), wanted)
    # There is no noise in it that a key could seed.
    key = jax.random.key(1)
    np.testing.assert_array_equal(apply(STOCHASTIC, serving, X, key), wanted)


def test_the_rng_stream_seeds_forward_operands(variables, wanted):
    one, again, other = (
        np.asarray(apply(STOCHASTIC, variables, X, jax.random.key(seed)))
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, again)
    assert np.mean(one != other) > 0.5
    plain = apply(STOCHASTIC, variables, X)
    assert np.mean(np.asarray(plain) != np.asarray(wanted)) > 0.5
    trains = Model(CFG, QuantMode.TRAIN)
    np.testing.assert_array_equal(apply(trains, variables, X), plain)


def test_is_converted_on_disk_rounded_to_nearest(variables, wanted, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(source, variables)
    sample = jax.ShapeDtypeStruct(X.shape, X.dtype)
    checkpoint.convert_checkpoint(source, target, STOCHASTIC, sample)
    loaded = checkpoint.load_serving(target, model=STOCHASTIC)
    np.testing.assert_array_equal(apply(STOCHASTIC, loaded, X), wanted)


def test_frozen_integers_of_either_grid_are_contracted():
    """In a stochastic config: those of a conversion, and those that have noise."""
    nearest = aqtlite.quantize(W, NOISY.to_nearest(), 0)
    for q in (nearest, aqtlite.quantize(W, NOISY, 0)):
        assert matmul(BOTH, X, q).shape == (16, 16)
    with pytest.raises(TypeError, match="on another grid than its config's: bits"):
        matmul(BOTH, X, aqtlite.quantize(W, tensor(3), 0))


def test_describe():
    shared = dataclasses.replace(
        NOISY, noise=noise.JaxRandom(), noise_shared_axes=(0, -1)
    )
    raw = config.DotGeneralRaw(lhs=NOISY, rhs=shared)
    table = config.describe(dataclasses.replace(BOTH, fwd=raw))
    rows = [line.split("per-channel") for line in table.splitlines()]
    cells = {row[0].split()[0]: row[1].strip() for row in rows if len(row) == 2}
    assert cells["fwd.lhs"] == "stochastic, served nearest"
    assert cells["fwd.rhs"] == (
        "stochastic, JaxRandom, shared along 0,-1, served nearest"
    )
    assert cells["dlhs.lhs"] == "stochastic"


@dataclasses.dataclass(frozen=True)
class OnlyStochastic(numerics.IntSymmetric):
    """A grid without its nearest counterpart."""

    to_nearest = numerics.Numerics.to_nearest


def test_a_grid_that_cannot_be_served_is_refused():
    grid = OnlyStochastic(bits=4, preserve_max_val=True, stochastic_rounding=True)
    how = config.Tensor(numerics=grid)
    match = r"^fwd\.rhs\.numerics: OnlyStochastic rounds stochastically and does not"
    with pytest.raises(ValueError, match=match):
        config.DotGeneral(fwd=config.DotGeneralRaw(rhs=how))
    assert config.DotGeneral(dlhs=config.DotGeneralRaw(lhs=how)).needs_noise
    with pytest.raises(NotImplementedError, match="has no to_nearest"):
        how.to_nearest()


def test_for_serving_changes_forward_operands_alone():
    cfg = BOTH.for_serving()
    assert not cfg.fwd.lhs.needs_noise and not cfg.fwd.rhs.needs_noise
    assert cfg.dlhs == BOTH.dlhs and cfg.needs_noise
    assert cfg.for_serving() is cfg
    shared = dataclasses.replace(NOISY, noise_shared_axes=(0,))
    assert shared.to_nearest() == NOISY.to_nearest()
