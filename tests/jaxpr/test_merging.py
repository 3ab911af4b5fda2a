"""Equations that compute what an earlier one has computed."""

import jax
import jax.numpy as jnp

from aqtlite.jaxpr import merging


def _closed(function, *args):
    return jax.make_jaxpr(function)(*args)


def _names(closed, locations):
    return sorted(
        closed.jaxpr.eqns[number].primitive.name for ((number, _),) in locations
    )


def test_chains_are_computed_once():
    def twice(x):
        return jnp.sin(x * 2.0) + jnp.sin(x * 2.0) * jnp.sin(x * 3.0)

    closed = _closed(twice, 0.5)
    found = merging.merged(closed)
    assert _names(closed, found.unread) == ["mul", "sin"]
    assert jax.core.eval_jaxpr(found.closed.jaxpr, (), 0.5) == [twice(0.5)]


def test_outputs_are_read_at_the_first():
    found = merging.merged(_closed(lambda x: (x + 1, x + 1), 0.5))
    first, second = found.closed.jaxpr.outvars
    assert first is second


def test_different_parameters_and_dtypes_stay():
    def different(x):
        return jnp.sum(x, 0), jnp.sum(x, 1), x.astype("int8"), x.astype("int32")

    assert not merging.merged(_closed(different, jnp.ones((2, 2)))).unread


def test_what_is_computed_again_on_purpose_stays():
    def remat(x):
        block = jax.checkpoint(lambda x: jnp.sin(x))
        return block(x) + block(x)

    assert not merging.merged(_closed(remat, 0.5)).unread


def test_replaced_equations_stay():
    closed = _closed(lambda x: (jnp.sin(x), jnp.sin(x)), 0.5)
    assert not merging.merged(closed, [((1, 0),)]).unread
