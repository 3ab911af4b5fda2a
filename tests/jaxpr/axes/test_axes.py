import jax
import jax.numpy as jnp
import pytest
from jax import lax

from aqtlite.jaxpr.axes import axes

pytestmark = pytest.mark.code("quick")


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
        (lambda x, w: w.reshape(2, 3, 1), [((1, 0), (1, 1), None)]),
        (lambda x, w: jnp.swapaxes(x.reshape(1, 3), 0, 1).reshape(3), [((0, 0),)]),
        (lambda x, w: jnp.pad(w, ((0, 0), (0, 1))), [((1, 0), None)]),
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


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        # As blocks do.
        (lambda x: (2 * x.reshape(2, 4, 3, 2)).reshape(8, 6), (0, 1)),
        (lambda x: x.reshape(2, 4, 6).transpose(2, 0, 1).reshape(6, 8), (1, 0)),
        (lambda x: x.reshape(2, 4, 6)[:, ::-1].reshape(8, 6), (None, None)),
        (lambda x: x.reshape(2, 4, 6).transpose(1, 0, 2).reshape(8, 6), (None, 1)),
        (lambda x: x.reshape(2, 4, 6), (None, None, 1)),
        (lambda x: x.reshape(2, 4, 6).reshape(2, 24), (None, None)),
        (lambda x: x.reshape(4, 12).reshape(8, 6), (None, None)),
    ],
)
def test_axes_that_are_split_and_joined(function, expected):
    closed = jax.make_jaxpr(function)(jnp.ones((8, 6)))
    (found,) = axes.output_axes(closed)
    assert tuple(axis and axis.axis for axis in found) == expected
