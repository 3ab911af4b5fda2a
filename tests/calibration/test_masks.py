"""Statistics of the elements that count are those of an array without the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite import calibration, numerics
from aqtlite.calibration import Statistics, counting, masks

SYMMETRIC = {
    "max": calibration.MaxOverBatches(),
    "mean": calibration.MeanOverBatches(of=calibration.AbsMax(clipping_scale=0.9)),
    "moving": calibration.MovingAverage(decay=0.5),
    "percentile": calibration.PercentileOverBatches(90),
    "mse": calibration.MseOverBatches((1.0, 0.7, 0.4)),
    "delayed": calibration.DelayedScaling(length=2),
    "periodic": calibration.Periodic(of=calibration.RMS(2.0), period=2),
    "deviations": calibration.WeightedDeviations(l1_coeff=1, max_coeff=1),
    "deviations with zeros": calibration.WeightedDeviations(
        lp_coeff=1, filter_zeros=False
    ),
    "abs mean": calibration.MaxOverBatches(of=calibration.AbsMean()),
    "rms": calibration.MeanOverBatches(of=calibration.RMS(3.0)),
    "percentile of each": calibration.MaxOverBatches(of=calibration.Percentile(85)),
    "mse of each": calibration.MaxOverBatches(of=calibration.MseSearch((1.0, 0.6))),
    "snr": calibration.MaxOverBatches(of=calibration.SnrSearch((1.0, 0.6))),
}
AFFINE = {
    "min max": calibration.MaxOverBatches(of=calibration.MinMax()),
    "percentile": calibration.PercentileOverBatches(90),
    "mse": calibration.MseOverBatches((1.0, 0.7)),
    "percentile of each": calibration.MeanOverBatches(of=calibration.Percentile(85)),
    "mse of each": calibration.MovingAverage(of=calibration.MseSearch((1.0, 0.6))),
}
SYMMETRIC_GRIDS = (
    numerics.IntSymmetric(bits=4),
    numerics.IntSymmetric(bits=4, preserve_zero=False),
)
ROWS = jnp.array([True, True, False, True, False, True, True, False])


def batches():
    for seed in range(3):
        x = jax.random.normal(jax.random.key(seed), (8, 6)) * (seed + 1)
        yield jnp.where(jnp.arange(6) == seed, 0, x)


def cases():
    """Those per tensor are compiled as users compile: their bits survive fusion."""
    for axes, code in ((0, 1), "users"), ((0,), "quick"):
        marks = pytest.mark.code(code)
        for name, how in SYMMETRIC.items():
            for grid in SYMMETRIC_GRIDS:
                if grid.arithmetic == "integer" or "mse" not in name:
                    case = f"{name} {grid} {axes}"
                    yield pytest.param(how, grid, axes, id=case, marks=marks)
        for name, how in AFFINE.items():
            grid = numerics.IntAffine(bits=4)
            yield pytest.param(how, grid, axes, id=f"affine {name} {axes}", marks=marks)


@pytest.mark.parametrize(("how", "grid", "axes"), cases())
def test_as_if_the_others_were_absent(how, grid, axes):
    shape = (1, 1 if 1 in axes else 6)

    @jax.jit
    def after(statistics, x, mask):
        return counting.masked(how, statistics, x, mask, axes, grid)

    whole = jax.jit(lambda s, x: counting.updated(how, s, x, axes, grid))
    got = wanted = counting.before_first(how, shape, grid)
    nothing = jnp.zeros((8, 6), bool)
    for i, x in enumerate(batches()):
        padding = jnp.full_like(x, (np.nan, 1e30, -np.inf)[i])
        mask = jnp.broadcast_to(ROWS[:, None], x.shape)
        got = after(got, jnp.where(mask, x, padding), mask)
        got = after(got, padding, nothing)
        wanted = whole(wanted, x[ROWS])
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    assert got.batches == 3


@pytest.mark.parametrize("how", [calibration.MaxOverBatches(of=calibration.RMS(1.0))])
def test_no_element_of_a_channel(how):
    grid, mask = numerics.IntSymmetric(bits=8), jnp.array([[True, False]] * 3)
    before = counting.before_first(how, (1, 2), grid)
    found = counting.masked(how, before, jnp.full((3, 2), 2.0), mask, (0,), grid)
    np.testing.assert_array_equal(how.range(mask, (0,), grid, found).high, [[2, 0]])


class Mean(calibration.Calibration):
    """A calibration from outside, which has no way to leave out elements."""

    has_state = True

    def init_state(self, shape, grid):
        return jnp.zeros(shape)

    def update(self, statistics, x, axes, grid):
        return statistics.state + jnp.abs(x).mean(axes, keepdims=True)

    def range(self, x, axes, grid, statistics):
        return calibration.Range(statistics.state / statistics.batches)


class Bound(calibration.Calibration):
    def bound(self, x, axes):
        return jnp.abs(x).mean(axes, keepdims=True)


@pytest.mark.parametrize(
    ("how", "method"),
    [
        (Mean(), "Mean has no `masked_update`"),
        (calibration.MaxOverBatches(of=Bound()), "Bound has no `masked_range`"),
    ],
)
def test_calibrations_that_cannot(how, method):
    grid, x = numerics.IntSymmetric(bits=8), jnp.ones((2, 3))
    before = Statistics(jnp.zeros(()), how.init_state((1, 1), grid))
    with pytest.raises(ValueError, match=method):
        counting.masked(how, before, x, x > 0, (0, 1), grid)


def test_the_arrays_of_a_batch_that_have_tokens():
    tokens, mask = jnp.zeros((2, 3), int), np.ones((2, 3), bool)
    batch = {"features": jnp.zeros((2, 3, 4)), "length": jnp.zeros(2), "x": tokens}
    found = masks.of_leaves(mask, (batch,))
    assert [one is not None for one in found.masks] == [True, False, True]
    assert found.is_known == (True, False, True)
    of_each = masks.of_leaves((None, mask), (tokens, tokens))
    assert of_each.masks[0] is None
    assert of_each.masks[1].shape == (2, 3)
    assert of_each.is_known == (True, True)
    assert masks.of_leaves(None, (tokens,)).masks == [None]


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (np.ones((2, 3), int), TypeError, r"array of bool.*got int64\[2,3\].*!= 0"),
        ([[True] * 3] * 2, TypeError, "array of bool"),
        (np.ones((3, 2), bool), ValueError, r"\(3, 2\), which are the leading axes"),
        (np.bool_(True), ValueError, "leading axes"),
        ((np.ones((2, 3), bool),) * 2, ValueError, "a tuple of 2 for a batch of 1"),
    ],
)
def test_masks_that_do_not_fit(mask, error, message):
    with pytest.raises(error, match=message):
        masks.of_leaves(mask, (jnp.zeros((2, 3, 4)),))


def test_a_mask_for_each_batch():
    assert list(masks.with_batches([1, 2], lambda x: -x)) == [(1, -1), (2, -2)]
    assert list(masks.with_batches([1, 2], iter("ab"))) == [(1, "a"), (2, "b")]
    assert list(masks.with_batches([1], None)) == [(1, None)]
    with pytest.raises(ValueError, match="fewer masks"):
        list(masks.with_batches([1, 2], ["a"]))
    with pytest.raises(ValueError, match="more masks"):
        list(masks.with_batches([1], "ab"))
    for wrong in (np.ones(3, bool), 3):
        with pytest.raises(TypeError, match="mask must be a function"):
            list(masks.with_batches([1], wrong))
