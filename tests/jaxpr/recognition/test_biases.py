import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from aqtlite.jaxpr import sites
from aqtlite.jaxpr.recognition import biases

pytestmark = pytest.mark.code("quick")

B, W, X = jnp.zeros(3), jnp.ones((2, 3)), jnp.ones((5, 2))


def _bias(function):
    """The bias of the only contraction of a function of B, W and X."""
    closed = jax.make_jaxpr(function)(B, W, X)
    (site,) = sites.find(closed).contractions
    return biases.find(closed, site.location)


def _scan(b, w, x):
    return lax.scan(lambda c, one: (c, one @ w + b), 0, x)


@pytest.mark.parametrize(
    "function",
    [
        lambda b, w, x: x @ w + b,
        lambda b, w, x: b + x @ w,
        lambda b, w, x: jax.nn.relu(x @ w + jnp.reshape(b, (1, 3))),
        lambda b, w, x: (x @ w).reshape(5, 3, 1)[:, :, 0] + b[None],
        lambda b, w, x: (w.T @ x.T).T + b,
        lambda b, w, x: (w.T @ x.T) + b[:, None],
        lambda b, w, x: jax.jit(jnp.matmul)(x, w) + b,
        lambda b, w, x: jax.jit(lambda y: y + b)(x @ w),
        lambda b, w, x: jax.checkpoint(lambda b: x @ w + b)(b),
        lambda b, w, x: jax.vmap(lambda x: x @ w + b)(x),
        lambda b, w, x: (x.astype("bfloat16") @ w.astype("bfloat16")) + b,
    ],
)
def test_bias(function):
    bias = _bias(function)
    assert bias is not None and bias.input == 0
    closed = jax.make_jaxpr(function)(B, W, X)
    (site,) = sites.find(closed).contractions
    shape = site.eqn.outvars[0].aval.shape
    result = np.arange(15, dtype="float32").reshape(5, 3)
    given = result.T if shape == (3, 5) else result
    total, count = bias.sums(jnp.asarray(given))
    np.testing.assert_allclose(total / count, result.mean(0))


@pytest.mark.parametrize(
    "function",
    [
        lambda b, w, x: x @ w,
        lambda b, w, x: x @ w + 1,
        lambda b, w, x: x @ w * b,
        lambda b, w, x: x @ w + 2 * b,
        lambda b, w, x: x @ w + jnp.ones(3),
        lambda b, w, x: jnp.tanh(x @ w) + b,
        lambda b, w, x: (y := x @ w, y + b),
        lambda b, w, x: (y := x @ w) + y,
        _scan,
    ],
)
def test_no_bias(function):
    assert _bias(function) is None
