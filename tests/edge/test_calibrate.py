import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite import calibration, edge
from aqtlite.calibration import MeanOverBatches, MinMax, MovingAverage
from tests.edge import models

_W = jnp.eye(3)
_BATCHES = [jnp.full((2, 3), 1.0), jnp.full((2, 3), -3.0), jnp.full((1, 3), 2.0)]


def _function(w, x):
    return jnp.tanh(x @ w)


def test_nothing_that_was_seen_is_clipped():
    ranges = edge.calibrate(_function, _W, _BATCHES)
    assert dict(ranges) == {"input": (-3.0, 2.0), "fully_connected": (-3.0, 2.0)}


@pytest.mark.parametrize(
    "chosen, expected",
    [
        (MeanOverBatches(of=MinMax()), (-1.0, 1.0)),
        (calibration.PercentileOverBatches(100), (-3.0, 2.0)),
        (MinMax(), (-3.0, 2.0)),
    ],
)
def test_calibrations(chosen, expected):
    ranges = edge.calibrate(_function, _W, _BATCHES, calibration=chosen)
    np.testing.assert_allclose(ranges["input"], expected, rtol=0.05)


def test_averages_clip_when_asked():
    found = edge.calibrate(
        _function, _W, _BATCHES, calibration=MovingAverage(of=MinMax(), decay=0.5)
    )
    assert -3 < found["input"].low < 0 < found["input"].high < 2


def test_values_of_one_grid_have_one_range():
    def function(w, x):
        return jnp.concatenate([x @ w, x @ (2 * w)], -1).reshape(-1)

    ranges = edge.calibrate(function, _W, [_BATCHES[0]])
    assert len(ranges) == 2
    assert ranges["fully_connected"] == (0.0, 2.0)


def test_masks_are_no_part_of_a_range():
    mask = np.tril(np.ones((3, 3), bool))

    def function(w, x):
        return jax.nn.softmax(jnp.where(mask, x @ w, -1e9))

    ranges = edge.calibrate(function, _W, [models.normal((3, 3))])
    low, high = ranges["fully_connected"]
    assert low == pytest.approx(high - 10)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_nan_in_the_data(bad):
    batches = [_BATCHES[0], _BATCHES[0].at[0, 1].set(bad)]
    with pytest.raises(ValueError, match="batch 1 gives NaN or infinity at 'input'"):
        edge.calibrate(_function, _W, batches)


def test_no_data():
    with pytest.raises(ValueError, match="no batch"):
        edge.calibrate(_function, _W, [])
    with pytest.raises(ValueError, match="batch 0 is empty"):
        edge.calibrate(_function, _W, [jnp.ones((0, 3))])


def test_wrong_calibration():
    with pytest.raises(TypeError, match="one that gathers statistics"):
        edge.calibrate(_function, _W, _BATCHES, calibration="max")


def test_no_model():
    with pytest.raises(TypeError, match="must be a Linen module, an NNX module, or"):
        edge.calibrate(3, _W, _BATCHES)
