"""Forwarding: which outputs of a jaxpr are inputs of it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from aqtlite.jaxpr.recognition.forwarding import forwarded_inputs

pytestmark = pytest.mark.code("quick")

X, Y = jnp.ones((3, 2)), jnp.zeros((3, 2))


def test_outputs_that_are_inputs():
    closed = jax.make_jaxpr(lambda x, y: (y, x + 1, x, jnp.float32(0)))(X, Y)
    assert forwarded_inputs(closed) == [1, None, 0, None]


def test_through_calls():
    def function(x, y):
        return jax.jit(lambda x, y: (x @ y.T, y))(x, y)

    closed = jax.make_jaxpr(jax.checkpoint(function))(X, Y)
    assert forwarded_inputs(closed) == [None, 1]


def test_slices_that_a_scan_stacks_again():
    def step(carry, slices):
        kept, changed = slices
        return carry + kept, (kept, changed + 1, carry)

    def function(carry, x, y):
        return lax.scan(jax.checkpoint(step), carry, (x, y))

    closed = jax.make_jaxpr(function)(jnp.ones(2), X, Y)
    assert forwarded_inputs(closed) == [None, 1, None, None]


def test_a_carry_that_stays_and_one_that_is_exchanged():
    def function(a, b, c):
        return lax.scan(lambda x, _: ((x[0], x[2], x[1]), x[0]), (a, b, c), None, 3)

    closed = jax.make_jaxpr(function)(1.0, 2.0, 3.0)
    # What is stacked from the carry is an array of three.
    assert forwarded_inputs(closed) == [0, None, None, None]


def test_axes_that_are_moved_and_moved_back():
    def function(x, y):
        moved = jnp.moveaxis(x, 2, 0)
        _, (kept, turned) = lax.scan(lambda _, z: (None, (z, z.T)), None, moved)
        one = jnp.moveaxis(kept, 0, 2)
        return one, jnp.moveaxis(turned, 0, 2), kept, jnp.moveaxis(kept, 0, 1), y.T.T

    closed = jax.make_jaxpr(function)(jnp.ones((2, 2, 2)), Y)
    assert forwarded_inputs(closed) == [0, None, None, None, 1]


def test_slices_of_slices():
    def function(x):
        return lax.scan(lambda _, y: lax.scan(lambda _, z: (None, z), None, y), None, x)

    assert forwarded_inputs(jax.make_jaxpr(function)(X)) == [0]
