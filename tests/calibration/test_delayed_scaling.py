"""Delayed scaling: ranges of the batches before."""

import flax.linen as nn
import jax.numpy as jnp
import pytest

from aqtlite import config
from aqtlite.calibration import DelayedScaling
from aqtlite.flax import AqtDotGeneral, calibrate, convert
from aqtlite.testing import assert_served_equals_trained
from tests.calibration.gathered import after, before_first
from tests.common import normal
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

X = normal((4, 8))


def highs(how, magnitudes):
    statistics = before_first(how, (1, 1), None)
    found = []
    for magnitude in magnitudes:
        x = jnp.full((2, 3), -magnitude)
        statistics = after(how, statistics, x, (0, 1), None)
        found.append(float(how.range(None, (0, 1), None, statistics).high[0, 0]))
    return found


def test_the_range_is_that_of_the_batches_before():
    assert highs(DelayedScaling(length=2), [3.0, 1.0, 5.0, 2.0, 2.0, 2.0]) == [
        3.0,
        3.0,
        3.0,
        5.0,
        5.0,
        2.0,
    ]
    assert highs(DelayedScaling(length=1), [1.0, 2.0, 3.0]) == [1.0, 1.0, 2.0]


def test_zeros():
    assert highs(DelayedScaling(length=1), [0.0, 1.0, 1.0]) == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "cfg", [config.static_int8(DelayedScaling()), config.fp8(delayed=True)]
)
def test_trains_and_is_served(cfg):
    model = nn.Dense(8, dot_general=AqtDotGeneral(cfg))
    variables = calibrate(model, init(model, X), [X, 2 * X, X])
    serving = convert(model, variables, X)
    assert_served_equals_trained(model, variables, X, serving=serving)


@pytest.mark.parametrize(
    ("length", "error"), [(0, ValueError), (2.0, TypeError), (True, TypeError)]
)
def test_refuses(length, error):
    with pytest.raises(error, match=r"DelayedScaling\.length must be"):
        DelayedScaling(length=length)
