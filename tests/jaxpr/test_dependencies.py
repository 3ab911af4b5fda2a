import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from aqtlite.jaxpr import analysis

pytestmark = pytest.mark.code("quick")


def _trace(function, *args):
    return jax.make_jaxpr(function)(*args)


def _dependencies(function, *args):
    return [set(d) for d in analysis.output_dependencies(_trace(function, *args))]


def _scan_with_carry(x, w):
    """The carry takes up x only in the second step."""

    def step(carry, _):
        previous, latest = carry
        return (latest, x), (previous, w * 2)

    return lax.scan(step, (jnp.zeros(3), jnp.zeros(3)), None, length=4)[1]


def _while(x, w):
    return lax.while_loop(lambda c: c[0].sum() < 3, lambda c: (c[0] + 1, c[1]), (x, w))


def _custom(x, w):
    double = jax.custom_vjp(lambda w: w * 2)
    double.defvjp(lambda w: (w * 2, None), lambda _, g: (g,))
    return x, double(w)


def _custom_jvp(x, w):
    return x, jax.nn.relu(w)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, w: (x, w), [{0}, {1}]),
        (lambda x, w: (jnp.ones(3), 2.0), [set(), set()]),
        (lambda x, w: (x * w, w.T), [{0, 1}, {1}]),
        (lambda x, w: jax.jit(lambda x, w: (x, w + 1))(x, w), [{0}, {1}]),
        (lambda x, w: jax.checkpoint(lambda x, w: (x + 1, w + 1))(x, w), [{0}, {1}]),
        (_custom, [{0}, {1}]),
        (_custom_jvp, [{0}, {1}]),
        (_scan_with_carry, [{0}, {1}]),
        (lambda x, w: (jnp.zeros(x.shape) + w,), [{1}]),
    ],
)
def test_dependencies(function, expected):
    assert _dependencies(function, jnp.ones(3), jnp.ones(3)) == expected


@pytest.mark.parametrize(
    "function",
    [
        _while,
        lambda x, w: lax.cond(x.sum() > 0, lambda w: w, lambda w: w + 1, w),
        lambda x, w: lax.fori_loop(0, 3, lambda i, c: (c[0] * 2, c[1] + c[0]), (x, w)),
        lambda x, w: jax.pure_callback(np.add, jnp.ones(3), x, w),
    ],
)
def test_never_misses_a_dependency(function):
    """The input that decides is found, even where others are found needlessly."""
    x, w = jnp.ones(3), jnp.ones(3)
    outputs = jax.tree.leaves(_dependencies(function, x, w))
    assert any(0 in deps for deps in outputs)


def test_cond_depends_on_its_predicate():
    (deps,) = _dependencies(
        lambda x, w: lax.cond(x.sum() > 0, lambda w: w, lambda w: w + 1, w),
        jnp.ones(3),
        jnp.ones(3),
    )
    assert deps == {0, 1}


def test_inputs_that_are_read_beside_an_operand():
    """An operand that is left out is found at its place, in the body of a scan."""

    def function(x, w):
        return lax.scan(lambda c, _: (c + jnp.sin(w), c), x, None, length=2)

    whole = _trace(function, jnp.ones(3), jnp.ones(3))
    (scan,) = (i for i, e in enumerate(whole.eqns) if e.primitive.name == "scan")
    body = whole.eqns[scan].params["jaxpr"]
    (sin,) = (i for i, e in enumerate(body.eqns) if e.primitive.name == "sin")
    unread = {((scan, 0), (sin, 0)): {0}}
    assert analysis.read_inputs(whole, {0, 1}, {}) == {0, 1}
    assert analysis.read_inputs(whole, {0, 1}, unread) == {0}
