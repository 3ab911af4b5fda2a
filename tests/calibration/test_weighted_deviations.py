import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite import config, numerics
from aqtlite.calibration import MovingAverage, WeightedDeviations
from tests.calibration import gathered
from tests.common import normal

pytestmark = pytest.mark.code("quick")

GRID = numerics.IntSymmetric(bits=8)
ALL = WeightedDeviations(
    l1_coeff=1.5, lp_coeff=0.5, max_coeff=0.25, constant=0.1, p=3, ema_update_count=4
)


def after(how, batches, axes=(0, 1)):
    return np.asarray(gathered.gathered(how, batches, axes, GRID)[1].high)


def test_formula():
    """A moving average of one batch is that batch."""
    x = jnp.array([[1.0, -2.0, 0.0], [3.0, 0.5, 0.0]])
    how = WeightedDeviations(
        l1_coeff=1.5,
        lp_coeff=0.5,
        max_coeff=0.25,
        constant=0.1,
        p=3,
        ema_update_count=1,
    )
    values = np.array([1, 2, 3, 0.5])
    wanted = 1.5 * values.mean() + 0.5 * (values**3).mean() ** (1 / 3) + 0.25 * 3 + 0.1
    np.testing.assert_allclose(after(how, [x]), wanted, rtol=1e-6)
    everything = WeightedDeviations(l1_coeff=1, filter_zeros=False, ema_update_count=1)
    np.testing.assert_allclose(after(everything, [x]), 6.5 / 6, rtol=1e-6)


def test_zeros_and_values_that_are_none():
    assert after(ALL, [jnp.zeros((2, 3))]) == np.float32(0.1)
    assert np.isnan(after(ALL, [jnp.array([[1.0, np.nan]])]))


@pytest.mark.code("users")
def test_equal_under_jit():
    x = normal((8, 5))
    np.testing.assert_array_equal(
        jax.jit(lambda x: after_state(ALL, x))(x)["l1"], after_state(ALL, x)["l1"]
    )


def after_state(how, x):
    return gathered.gathered_eagerly(how, [x], (0,), GRID)[0].state


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({}, ValueError, "needs a coefficient that is not 0"),
        ({"l1_coeff": -1}, ValueError, "l1_coeff must not be negative"),
        ({"l1_coeff": None}, TypeError, "l1_coeff must be a number"),
        ({"l1_coeff": 1, "p": 9}, ValueError, "p must be from 1/8 to 8"),
        ({"l1_coeff": 1, "ema_update_count": 0.5}, ValueError, "must be from 1 to 2"),
        ({"l1_coeff": 1, "ema_update_count": 2**30}, ValueError, "must be from 1 to 2"),
        ({"l1_coeff": 1, "update_count_prior": 0}, ValueError, "must be positive"),
        ({"l1_coeff": 1, "filter_zeros": 1}, TypeError, "must be a bool"),
    ],
)
def test_refuses(fields, error, match):
    with pytest.raises(error, match=match):
        WeightedDeviations(**fields)


def test_json():
    cfg = config.static_int8(ALL)
    assert config.from_json(config.to_json(cfg)) == cfg


@pytest.mark.parametrize("p", [1 / 8, 4, 8])
@pytest.mark.parametrize("magnitude", [1e-9, 1e-5, 1e5, 1e9])
def test_magnitudes_whose_powers_are_none(magnitude, p):
    how = WeightedDeviations(lp_coeff=1, l1_coeff=1, p=p, ema_update_count=2)
    batches = [jnp.full((2, 3), factor * magnitude) for factor in (1, 2)]
    # Of the prior, which is 0, an element remains a quarter, of the first batch 1/4.
    shares = np.array([0.25, 6 / 4, 6 / 2])
    shares /= shares.sum()
    values = np.array([0, 1, 2]) * magnitude
    wanted = (shares @ (values / magnitude) ** p) ** (1 / p) * magnitude
    np.testing.assert_allclose(after(how, batches), wanted + shares @ values, rtol=4e-6)


def test_subnormal_numbers_are_zeros():
    x = jnp.array([[1.0, 3.0, 1e-40, -1e-40]])
    how = WeightedDeviations(l1_coeff=1, ema_update_count=1)
    np.testing.assert_allclose(after(how, [x]), 2, rtol=1e-6)


@pytest.mark.code("users")
@pytest.mark.parametrize(
    "how", [ALL, pytest.param(MovingAverage(decay=0.9), marks=pytest.mark.slow)]
)
def test_averages_are_the_same_in_every_program(how):
    """Products and sums are not contracted."""
    batches = normal((4, 8, 64))

    def bounds(batches):
        statistics, found = gathered.before_first(how, (1, 64), GRID), []
        for x in batches:
            statistics = gathered.after(how, statistics, x, (0,), GRID)
            found.append(how.range(x, (0,), GRID, statistics).high)
        return statistics, found

    jax.tree.map(
        np.testing.assert_array_equal, jax.jit(bounds)(batches), bounds(batches)
    )
