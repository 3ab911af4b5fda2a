"""`Periodic`, and the warning of what it avoids."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import calibration, config, numerics, statistics
from aqtlite.errors import CostWarning
from tests.calibration.gathered import after, before_first
from tests.common import MATMUL, normal

pytestmark = pytest.mark.code("quick")

SEARCH = calibration.MseSearch((1.0, 0.8, 0.6))
HOW = calibration.Periodic(of=SEARCH, period=3)
X, W = normal((4, 8)), normal((8, 3), 1)


def config_with(updates):
    return config.update(config.fully_quantized(), updates)


def test_the_range_is_found_in_every_third_batch():
    grid = numerics.IntSymmetric(bits=4)
    batches = jnp.stack([X * (i + 1) for i in range(7)])

    def step(statistics, x):
        statistics = after(HOW, statistics, x, (0,), grid)
        return statistics, HOW.range(x, (0,), grid, statistics).high

    _, found = jax.lax.scan(step, before_first(HOW, (1, 8), grid), batches)
    wanted = [SEARCH.range(x, (0,), grid, ()).high for x in batches]
    for i, high in enumerate(found):
        np.testing.assert_array_equal(high, wanted[i - i % 3])


@pytest.mark.code("users")
def test_of_the_channels_of_a_weight_in_training():
    """As the search itself in the first step, without a warning."""
    shared = {"fwd.rhs.numerics": numerics.IntSymmetric(bits=4)}
    periodic = config_with(
        {
            **shared,
            "fwd.rhs.calibration": HOW,
            "fwd.rhs.calib_shared_axes": (0,),
        }
    )
    states = statistics.init_states(periodic, X, W, MATMUL)
    states = statistics.update_states(periodic, states, X, W, MATMUL)
    assert states.rhs.state["ends"]["high"].shape == (1, 3)

    def gradient(cfg, states):
        dot = aqtlite.make_dot_general(cfg)
        return jax.grad(lambda w: jnp.sum(dot(X, w, MATMUL, states=states) ** 2))(W)

    with warnings.catch_warnings():
        warnings.simplefilter("error", CostWarning)
        got = gradient(periodic, states)
    each = config_with({**shared, "fwd.rhs.calibration": SEARCH})
    with pytest.warns(CostWarning, match=r"fwd\.rhs\.calibration=MseSearch"):
        np.testing.assert_array_equal(got, gradient(each, None))


@pytest.mark.parametrize(
    ("paths", "how", "what"),
    [
        (("fwd.lhs", "fwd.rhs"), SEARCH, "convert with this one, or keep its range"),
        (("dlhs.lhs",), SEARCH, "two reductions for each of its 3 candidates"),
        (("fwd.lhs",), calibration.Percentile(99), "31 passes over the array"),
    ],
)
def test_costs_are_warned_of_once_for_each_path(paths, how, what):
    dot = aqtlite.make_dot_general(
        config_with({f"{path}.calibration": how for path in paths})
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", CostWarning)
        dot(X, W, MATMUL)
        assert not [one for one in caught if one.category is CostWarning]
        for rows in (4, 2):
            x = X[:rows]
            jax.jit(jax.grad(lambda x: dot(x, W, MATMUL).sum())).lower(x)
    texts = [str(one.message) for one in caught if one.category is CostWarning]
    assert [re.match(r"(.*)\.calibration=", text)[1] for text in texts] == [*paths]
    assert all(what in text for text in texts)


@pytest.mark.parametrize("period", [0, -1])
def test_refuses(period):
    with pytest.raises(ValueError, match=r"Periodic\.period must be 1 or more"):
        calibration.Periodic(period=period)
    for bad in (1.5, True, None):
        with pytest.raises(TypeError, match=r"Periodic\.period must be an int"):
            calibration.Periodic(period=bad)
    with pytest.raises(ValueError, match=r"Periodic\.of=.*gathers statistics itself"):
        calibration.Periodic(of=calibration.MaxOverBatches())


def test_json():
    cfg = config_with({"fwd.lhs.calibration": HOW, "fwd.lhs.calib_shared_axes": (0,)})
    assert config.from_json(config.to_json(cfg)) == cfg
