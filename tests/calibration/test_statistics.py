"""Bad input, for every calibration with statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import calibration, config, numerics, statistics
from tests.calibration.gathered import gathered, gathered_eagerly
from tests.common import MATMUL, normal, tensor

pytestmark = pytest.mark.code("quick")

MEMBERS = {
    "max": calibration.MaxOverBatches(),
    "max_affine": calibration.MaxOverBatches(of=calibration.MinMax()),
    "mean": calibration.MeanOverBatches(),
    "moving": calibration.MovingAverage(),
    "percentile": calibration.PercentileOverBatches(100),
    "deviations": calibration.WeightedDeviations(max_coeff=1, ema_update_count=1),
    "delayed": calibration.DelayedScaling(),
    "periodic": calibration.Periodic(of=calibration.MseSearch((1.0, 0.5))),
}
W = jnp.ones((3, 2))
USUAL = np.array([[1, -2, 0.5], [0, 3, 1]], np.float32)
BAD = (np.nan, -np.nan, np.inf, -np.inf)


@pytest.mark.parametrize("how", MEMBERS.values(), ids=MEMBERS)
def test_bad_input(how):
    is_affine = getattr(how, "of", None) == calibration.MinMax()
    grid = (numerics.IntAffine if is_affine else numerics.IntSymmetric)(bits=8)
    lhs = config.Tensor(numerics=grid, calibration=how, calib_shared_axes="per_tensor")
    cfg = config.DotGeneral(fwd=config.DotGeneralRaw(lhs=lhs, rhs=tensor(8)))
    dot = aqtlite.make_dot_general(cfg)
    empty = statistics.init_states(cfg, USUAL, W, MATMUL)

    def after(*batches, w=W):
        states = empty
        for x in batches:
            states = statistics.update_states(cfg, states, x, w, MATMUL)
        return states

    def result(first, x, w=W):
        # Delayed scaling looks back.
        return dot(x, w, MATMUL, states=after(first, x, w=w))

    usual, zeros = jnp.asarray(USUAL), jnp.zeros((2, 3))
    one = zeros.at[0, 0].set(3.0)
    firsts, lasts = jnp.stack([usual, zeros, one]), jnp.stack([usual, zeros, one])
    fine, of_zeros, of_one = jax.jit(jax.vmap(result))(firsts, lasts)
    np.testing.assert_allclose(fine, USUAL @ W, atol=0.15)
    np.testing.assert_array_equal(of_zeros, 0)
    np.testing.assert_allclose(of_one, one @ W, atol=0.05)

    bad = jnp.stack([usual.at[1, 2].set(value) for value in BAD])
    assert np.isnan(jax.jit(jax.vmap(result, (None, 0)))(usual, bad)).all()
    entered = jax.jit(jax.vmap(lambda bad: after(bad, one, bad, usual)))(bad)
    for got, wanted in zip(
        *map(jax.tree.leaves, (entered, jax.jit(after)(one, usual))), strict=True
    ):
        np.testing.assert_array_equal(got, np.broadcast_to(wanted, got.shape))

    element = jnp.array([[-3.0]])
    single = jax.jit(result)(element, element, W[:1])
    np.testing.assert_allclose(single, [[-3.0, -3.0]], atol=0.05)
    with pytest.raises(
        ValueError, match=r"fwd\.lhs\.calibration has no statistics yet"
    ):
        dot(usual, W, MATMUL, states=empty)
    unready = jax.jit(lambda states: dot(usual, W, MATMUL, states=states))(empty)
    assert np.isnan(unready).all()


@pytest.mark.parametrize("how", MEMBERS.values(), ids=MEMBERS)
def test_statistics_of_another_calibration(how):
    other = calibration.MseOverBatches()
    if getattr(how, "of", None) == calibration.MinMax():
        other = calibration.MaxOverBatches()

    def cfg_of(one, grid):
        lhs = config.Tensor(
            numerics=grid, calibration=one, calib_shared_axes="per_tensor"
        )
        return config.DotGeneral(fwd=config.DotGeneralRaw(lhs=lhs, rhs=tensor(8)))

    is_affine = getattr(how, "of", None) == calibration.MinMax()
    grid = (numerics.IntAffine if is_affine else numerics.IntSymmetric)(bits=8)
    usual, cfg = jnp.asarray(USUAL), cfg_of(how, grid)
    others = statistics.init_states(
        cfg_of(other, numerics.IntSymmetric(bits=8)), usual, W, MATMUL
    )
    with pytest.raises(ValueError, match=r"fwd\.lhs\.calibration=.*was given statist"):
        aqtlite.make_dot_general(cfg)(usual, W, MATMUL, states=others)
    with pytest.raises(ValueError, match="gather them again with this config"):
        statistics.update_states(cfg, others, usual, W, MATMUL)


CLIPPED = {
    "symmetric": (
        calibration.AbsMax(clipping_scale=0.9),
        numerics.IntSymmetric(bits=8),
    ),
    "affine": (calibration.MinMax(clipping_scale=0.9), numerics.IntAffine(bits=8)),
}


@pytest.mark.parametrize(("of", "grid"), CLIPPED.values(), ids=CLIPPED)
@pytest.mark.parametrize(
    "kind",
    [
        calibration.MaxOverBatches,
        calibration.MeanOverBatches,
        calibration.MovingAverage,
    ],
)
def test_clipped_ranges_have_equal_bits_in_every_program(kind, of, grid):
    """XLA would contract the product with what follows it."""
    for seed in range(8):
        batches = [normal((4, 16), 10 * seed + i) for i in range(6)]
        args = kind(of=of), batches, (0, 1), grid
        got, wanted = (one(*args)[0] for one in (gathered, gathered_eagerly))
        jax.tree.map(np.testing.assert_array_equal, got, wanted)
