import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from aqtlite.jaxpr import slicing

pytestmark = pytest.mark.code("quick")


def _trace(function, *args):
    return jax.make_jaxpr(function)(*args)


def test_slices_keeps_what_is_wanted():
    big = np.arange(3.0)

    def function(x, w, v):
        return jnp.sin(x) @ w, w * 2 + big, v, jnp.cos(v)

    whole = _trace(function, jnp.ones(3), jnp.ones(3), jnp.ones(3))
    part = slicing.slice_outputs(whole, {"first": [1, 3], "again": 1})
    assert part.inputs == (1, 2)
    values = jax.jit(part)(jnp.ones(3), jnp.zeros(3))
    np.testing.assert_array_equal(values["first"][0], 2 + big)
    np.testing.assert_array_equal(values["first"][1], [1] * 3)
    np.testing.assert_array_equal(values["again"], 2 + big)
    assert not any(eqn.primitive.name == "sin" for eqn in part.jaxpr.jaxpr.eqns)


def test_slices_of_constants_and_inputs():
    whole = _trace(lambda x, w: (w, 3.0, jnp.arange(4)), jnp.ones(3), jnp.ones(3))
    part = slicing.slice_outputs(whole, [0, 1, 2])
    assert part.inputs == (1,)
    w, three, _ = part(jnp.zeros(3))
    assert float(three) == 3.0
    assert not w.any()


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint])
def test_slices_goes_into_a_body(transform):
    whole = _trace(
        transform(lambda x, w: (jnp.sin(x), w * 2)), jnp.ones(3), jnp.ones(3)
    )
    assert slicing.slice_outputs(whole, 1).inputs == (1,)


def test_slices_goes_into_a_scan():
    def function(x, w):
        return lax.scan(lambda c, w: (c + w, w * 2), x, w)

    whole = _trace(function, jnp.float32(1), jnp.ones(3))
    assert slicing.slice_outputs(whole, 1).inputs == (1,)


def test_a_reduction_is_not_a_call():
    """Its computation has as many inputs and outputs as the equation itself."""

    def largest(x, w):
        def combine(a, b):
            keep = a[0] >= b[0]
            return jnp.where(keep, a[0], b[0]), jnp.where(keep, a[1], b[1])

        index = lax.iota(jnp.int32, 3)
        value, at = lax.reduce((w, index), (-jnp.inf, jnp.int32(-1)), combine, (0,))
        return x, value, at

    w = jnp.array([1.0, 5.0, 2.0])
    part = slicing.slice_outputs(_trace(largest, jnp.ones(3), w), (1, 2))
    assert part.inputs == (1,)
    assert [float(v) for v in part(w)] == [5, 1]
