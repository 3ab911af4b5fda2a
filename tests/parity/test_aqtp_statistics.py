"""Calibrations with statistics find the bounds of aqtp's."""

import jax.numpy as jnp
import numpy as np
import pytest
from aqt.jax.v2 import utils
from aqt.jax.v2.flax import aqt_flax_calibration as aqtp
from aqt.jax.v2.flax import delayed_scaling_calibration as aqtp_delayed

from aqtlite import calibration, numerics
from tests.calibration.gathered import after, before_first
from tests.common import normal

pytestmark = [pytest.mark.slow, pytest.mark.code("quick")]

AXES = (0,)
BATCHES = [
    jnp.where(jnp.abs(x) < 0.3, 0, x) for x in (normal((6, 4), s) for s in range(4))
]


def aqtp_bounds(module):
    """The bound after each batch."""
    context = utils.Context(
        key=None, train_step=None, quant_mode=utils.QuantMode.CALIBRATE
    )
    variables = module.init({}, BATCHES[0], AXES, context, method="get_bound")
    if isinstance(module, aqtp.WeightedStatsCalibration):
        # Its `init` counts a batch already.
        shape = (1, BATCHES[0].shape[1])
        start = {
            "sum_of_ones": module.update_count_prior,
            "sum_of_vals": 0.0,
            "max_of_abs_vals": module.max_dev_prior,
            "sum_of_l1_vals": module.l1_dev_prior * module.update_count_prior,
            "sum_of_lp_vals": module.lp_dev_prior**module.lp_order
            * module.update_count_prior,
        }
        variables = {"q": {name: jnp.full(shape, x) for name, x in start.items()}}
    bounds = []
    for x in BATCHES:
        bound, variables = module.apply(
            variables, x, AXES, context, method="get_bound", mutable=["q"]
        )
        bounds.append(np.asarray(bound))
    return bounds


def our_bounds(how):
    grid = numerics.IntSymmetric(bits=8)
    statistics, bounds = before_first(how, (1, 4), grid), []
    for x in BATCHES:
        statistics = after(how, statistics, x, AXES, grid)
        bounds.append(np.asarray(how.range(x, AXES, grid, statistics).high))
    return bounds


def test_mean_of_abs_max():
    wanted = aqtp_bounds(aqtp.MeanOfAbsMaxCalibration(quant_collection="q"))
    np.testing.assert_array_equal(our_bounds(calibration.MeanOverBatches()), wanted)


@pytest.mark.parametrize("filter_zeros", [True, False])
@pytest.mark.parametrize("p", [2, 3])
def test_weighted_deviations(p, filter_zeros):
    """aqtp sums float32 in some order, and rounds powers otherwise."""
    theirs = aqtp.WeightedStatsCalibration(
        quant_collection="q",
        l1_dev_coeff=1.5,
        lp_dev_coeff=0.5,
        max_dev_coeff=0.25,
        const_bound_coeff=0.1,
        l1_dev_prior=0.3,
        lp_dev_prior=0.6,
        max_dev_prior=0.9,
        update_count_prior=2.0,
        lp_order=p,
        filter_zeros=filter_zeros,
        ema_update_count=10,
    )
    ours = calibration.WeightedDeviations(
        l1_coeff=1.5,
        lp_coeff=0.5,
        max_coeff=0.25,
        constant=0.1,
        l1_prior=0.3,
        lp_prior=0.6,
        max_prior=0.9,
        update_count_prior=2.0,
        p=p,
        filter_zeros=filter_zeros,
        ema_update_count=10,
    )
    np.testing.assert_allclose(our_bounds(ours), aqtp_bounds(theirs), rtol=3e-6)


@pytest.mark.parametrize("length", [1, 2, 16])
def test_delayed_scaling(length):
    """From the second batch on: before it, aqtp's bound is 0.

    The rules alone are called: aqtp's module keeps them in mutable arrays of a private
    name of JAX.
    """
    rules = aqtp_delayed.DelayedScalingCalibration(amax_history_length=length)
    history, bound = jnp.zeros(length), jnp.zeros(1)
    grid = numerics.Float.from_dtype("float8_e4m3fn")
    ours = calibration.DelayedScaling(length=length)
    statistics = before_first(ours, (1, 1), grid)
    for batch, x in enumerate([*BATCHES, 2 * BATCHES[0], *BATCHES]):
        bound = rules.compute_bound(history.max(), bound)
        history = rules.compute_history(x, history)
        statistics = after(ours, statistics, x, (0, 1), grid)
        if batch:
            found = ours.range(x, (0, 1), grid, statistics).high
            np.testing.assert_array_equal(found.ravel(), bound)
