"""Delayed scaling of gradients beside `flax.linen.fp8_ops`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops

import aqtlite
from aqtlite import calibration, config, numerics, statistics
from tests.common import MATMUL, normal

pytestmark = [pytest.mark.slow, pytest.mark.code("quick")]

LENGTH = 3
E5M2 = numerics.Float(exponent_bits=5, mantissa_bits=2)


def test_scales_of_gradients():
    """Equal from the second batch on, for gradients that are not zero and finite.

    The first batch has its own range here, and the scale 1 there. Where all magnitudes
    of the history are zeros, the scale is 1 here, and the one before there; what is not
    finite makes the scale NaN here, and is passed over there.
    """
    gradient = config.Tensor(
        numerics=E5M2,
        calibration=calibration.DelayedScaling(length=LENGTH),
        calib_shared_axes="per_tensor",
    )
    cfg = config.DotGeneral(drhs=config.DotGeneralRaw(lhs=gradient))
    dot = aqtlite.make_dot_general(cfg)
    x, w = normal((4, 6)), normal((6, 5), 1)
    state = statistics.init_states(cfg, x, w, MATMUL)
    scale, history = jnp.ones(1), jnp.zeros(LENGTH)

    @jax.jit
    def step(state, scale, history, g):
        def out(w, state):
            return dot(x, w, MATMUL, states=state)

        ours = jax.vjp(out, w, state)[1](g)
        return ours, fp8_ops.update_fp8_meta(g, jnp.float8_e5m2, scale, history)

    for i, magnitude in enumerate([1.0, 3.0, 0.5, 0.25, 20.0, 1.0, 1.0, 1.0]):
        g = magnitude * normal((4, 5), 2 + i)
        (dw, state), (scale, history) = step(state, scale, history, g)
        after = state.drhs.state
        # Theirs turns round, so that the order differs.
        np.testing.assert_array_equal(
            np.sort(after["history"].ravel()), np.sort(history)
        )
        if i:
            np.testing.assert_allclose(after["high"].ravel() / E5M2.bound, scale, 1e-6)
            rounded = fp8_ops.qdq(g, jnp.float8_e5m2, scale, jnp.float32)
            np.testing.assert_allclose(dw, x.T @ rounded, rtol=1e-5, atol=1e-4)
        else:
            assert scale == 1 and after["high"] == jnp.abs(g).max()
