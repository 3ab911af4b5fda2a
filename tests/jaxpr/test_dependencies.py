import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from aqtlite.jaxpr import dependencies


def _trace(function, *args):
    return jax.make_jaxpr(function)(*args)


def _dependencies(function, *args):
    return [set(d) for d in dependencies.output_dependencies(_trace(function, *args))]


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


def _marked(x, w):
    def mark(value, name):
        return checkpoint_name(value, name)

    y = mark(x * 2, "outside")
    y = jax.jit(lambda y, w: y + mark(w, "called"))(y, w)
    y, _ = lax.scan(lambda c, _: (mark(c, "carried") + w, None), y, None, length=2)
    y = lax.cond(x.sum() > 0, lambda w: mark(w, "branch"), lambda w: w, w) + y
    return lax.while_loop(lambda c: c.sum() < 9, lambda c: c + mark(w, "loop"), y)


def test_marks():
    whole = _trace(_marked, jnp.ones(3), jnp.ones(3))
    found = dependencies.named_values(whole)
    assert {name: set(one.dependencies) for name, one in found.items()} == {
        "outside": {0},
        "called": {1},
        "carried": {0, 1},
        "branch": {1},
        "loop": {1},
    }
    opaque = {name for name, one in found.items() if one.is_in_branch}
    assert opaque == {"branch", "loop"}


def test_dependencies_without_marked_values():
    def function(x, w):
        w = checkpoint_name(w, "weight")
        return lax.scan(lambda c, _: (c + w, c), x, None, length=2)

    whole = _trace(function, jnp.ones(3), jnp.ones(3))
    carry, stack = dependencies.output_dependencies(whole, without={"weight"})
    assert carry == stack == {0}
    assert dependencies.output_dependencies(whole)[0] == {0, 1}


def test_values_of_one_name_are_told_apart():
    def function(x, w):
        def step(carry, _):
            return checkpoint_name(carry + x, "here"), checkpoint_name(2 * w, "here")

        return jax.jit(lambda w: checkpoint_name(w, "here"))(w), lax.scan(
            step, jnp.zeros(3), None, length=2
        )

    found = dependencies.occurrences(_trace(function, jnp.ones(3), jnp.ones(3)), "here")
    needed = sorted(sorted(one.dependencies) for one in found)
    assert needed == [[0], [1], [1]]
