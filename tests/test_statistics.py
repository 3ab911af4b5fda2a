"""Statistics that the caller keeps, without a framework."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import config, statistics
from tests.common import MATMUL, normal, tensor
from tests.extensions.running import TENSOR

X, W = normal((4, 8)), normal((8, 3), 1)
CFG = config.DotGeneral(fwd=config.DotGeneralRaw(lhs=TENSOR, rhs=tensor(8)))
DOT = aqtlite.make_dot_general(CFG)


def states_of(*batches):
    states = statistics.init_states(CFG, X, W, MATMUL)
    for x in batches:
        states = statistics.update_states(CFG, states, x, W, MATMUL)
    return states


def test_the_range_is_that_of_all_batches():
    lhs, *others = states_of(X, 3 * X, X)
    assert not any(others)
    np.testing.assert_array_equal(lhs["state"]["largest"], [[3 * jnp.abs(X).max()]])
    assert states_of(3 * X, X)[0]["state"] == lhs["state"] and lhs["batches"] == 3


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_scale_comes_from_the_state(jit):
    out = jit(lambda x, states: DOT(x, W, MATMUL, states=states))(X, states_of(4 * X))
    step = 4 * jnp.abs(X).max() / 127.5
    assert jnp.abs(out - X @ W).max() < 0.6 * step * jnp.abs(W).sum(0).max()
    fine = jit(lambda x, states: DOT(x, W, MATMUL, states=states))(X, states_of(X))
    assert jnp.abs(fine - X @ W).max() < jnp.abs(out - X @ W).max()


def test_gradients_pass():
    grad = jax.grad(lambda x: DOT(x, W, MATMUL, states=states_of(X)).sum())(X)
    np.testing.assert_allclose(grad, jnp.ones((4, 3)) @ W.T, rtol=0.02, atol=0.02)


def test_without_statistics():
    with pytest.raises(ValueError, match=r"fwd\.lhs\.calibration=.*gathers statistics"):
        DOT(X, W, MATMUL)
    with pytest.raises(ValueError, match="needs statistics of several batches"):
        aqtlite.quantize(X, TENSOR, 1)


def test_before_the_first_batch():
    with pytest.raises(
        ValueError, match=r"fwd\.lhs\.calibration has no statistics yet"
    ):
        DOT(X, W, MATMUL, states=states_of())
    out = jax.jit(lambda states: DOT(X, W, MATMUL, states=states))(states_of())
    assert jnp.isnan(out).all()


def test_not_of_the_saved_operand():
    with pytest.raises(ValueError, match=r"drhs\.rhs\.calibration=.*only fwd"):
        config.DotGeneral(drhs=config.DotGeneralRaw(rhs=TENSOR))
