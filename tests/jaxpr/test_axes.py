import jax
import jax.numpy as jnp
import pytest
from jax import lax

from aqtlite.jaxpr import axes


def _scan(x, w):
    """A carry that comes back as it was, and stacked slices along a new axis."""
    carry, stacked = lax.scan(lambda c, row: (c, row * 2), x, w)
    return carry, stacked


def _lost_carry(x, w):
    return lax.scan(lambda c, row: (c[::-1], None), x, w)[0]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, w: (x, w), [((0, 0),), ((1, 0), (1, 1))]),
        (lambda x, w: w.T.astype(jnp.bfloat16), [((1, 1), (1, 0))]),
        (lambda x, w: jax.jit(lambda w: 2 * w)(w), [((1, 0), (1, 1))]),
        (lambda x, w: x * w, [((1, 0), (1, 1))]),
        (lambda x, w: w[None, 1:], [(None, None, (1, 1))]),
        (lambda x, w: w.reshape(6), [(None,)]),
        (lambda x, w: w @ x, [(None,)]),
        (lambda x, w: w[:, ::-1], [(None, None)]),
        (lambda x, w: jnp.ones((2, 3)), [(None, None)]),
        (_scan, [((0, 0),), ((1, 0), (1, 1))]),
        (_lost_carry, [(None,)]),
    ],
)
def test_axes_of_outputs(function, expected):
    closed = jax.make_jaxpr(function)(jnp.ones(3), jnp.ones((2, 3)))
    assert axes.output_axes(closed) == expected
