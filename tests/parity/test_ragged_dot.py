"""`make_ragged_dot` beside aqtp's and Qwix's: values, and Qwix's gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aqt.jax.v2 import aqt_ragged_dot
from aqt.jax.v2 import config as aqtp_config
from jax import lax
from qwix._src.core import ragged_dot_qt

import aqtlite
from aqtlite import config
from tests.common import nearest, normal, relative_error, rms_error

pytestmark = [pytest.mark.slow, pytest.mark.code("quick")]

M, K, N, G = 64, 128, 32, 4
X, W, COTANGENT = normal((M, K)), normal((G, K, N), 1), normal((M, N), 2)
SIZES = jnp.array([20, 0, 30, 14])


def qwix_ragged_dot(x, w, sizes):
    cfg = ragged_dot_qt.RaggedDotQtConfig(
        lhs_qtype="int8",
        rhs_qtype="int8",
        dlhs_grad_qtype="int8",
        drhs_grad_qtype="int8",
    )
    return ragged_dot_qt.ragged_dot_qt(x, w, sizes, cfg)


def value_and_gradients(dot):
    out, vjp = jax.vjp(lambda x, w: dot(x, w, SIZES), X, W)
    return out, *vjp(COTANGENT)


@pytest.fixture(scope="module")
def results():
    """Of a scale for all experts, as the peers have it, and for each."""
    shared = config.update(nearest(), {"fwd.rhs.calib_shared_axes": (0, 1)})
    dots = {
        "float": lax.ragged_dot,
        "shared": aqtlite.make_ragged_dot(shared),
        "own": aqtlite.make_ragged_dot(nearest()),
        "qwix": qwix_ragged_dot,
    }

    @jax.jit
    def run():
        found = {name: value_and_gradients(dot) for name, dot in dots.items()}
        cfg = aqtp_config.config_v4(fwd_bits=8, dlhs_bits=None, drhs_bits=None)
        found["aqtp"] = (aqt_ragged_dot.ragged_dot(X, W, SIZES, cfg=cfg),)
        return found

    return run()


def test_values_are_those_of_aqtp(results):
    """It has one scale for a column of all experts, and so have we if asked."""
    assert relative_error(results["shared"][0], results["aqtp"][0]) < 2e-6


def test_a_scale_for_each_expert_is_at_least_as_good(results):
    wanted = results["float"][0]
    assert rms_error(results["own"][0], wanted) < rms_error(results["aqtp"][0], wanted)


def test_values_and_gradients_are_within_the_error_of_qwix(results):
    for ours, theirs, wanted in zip(
        results["own"], results["qwix"], results["float"], strict=True
    ):
        # Another noise of rounding, of about the same size.
        assert rms_error(ours, wanted) <= 1.05 * rms_error(theirs, wanted)
        np.testing.assert_array_equal(np.asarray(ours)[wanted == 0], 0)
