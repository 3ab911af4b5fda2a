"""Marks: calls with static values beside them, through JAX's transformations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from aqtlite.jaxpr import rewriting, sites
from aqtlite.jaxpr.marks import Mark
from aqtlite.jaxpr.replacement import Replacement
from tests.common import normal

pytestmark = pytest.mark.code("quick")


@dataclasses.dataclass(frozen=True)
class Named(Mark):
    """A mark with a name."""

    name: str


def _product(x, w):
    return x @ w


PRODUCT = Named(_product, "product")
X, W = normal((4, 8), 0), normal((3, 8, 8), 1)


def scanned(x, w):
    step = jax.checkpoint(lambda x, w: (jnp.tanh(PRODUCT(x, w)), None))
    return lax.scan(step, x, w)[0]


def jitted(x, w):
    return jax.jit(lambda x, w: jax.jit(PRODUCT)(x, w[0]))(x, w)


def mapped(x, w):
    return jax.vmap(PRODUCT, (None, 1))(x, jnp.moveaxis(w, 0, 1))


def mapped_twice(x, w):
    rows = jax.vmap(PRODUCT, (0, None))
    return jax.vmap(rows, (None, 0))(x[:, None], w)


def differentiated(x, w):
    return jax.grad(lambda x: jnp.sin(PRODUCT(x, w[0])).sum())(x)


def with_rule(x, w):
    function = jax.custom_vjp(lambda x, w: PRODUCT(x, w))
    function.defvjp(
        lambda x, w: (PRODUCT(x, w), (x, w)),
        lambda kept, g: (g @ kept[1].T, kept[0].T @ g),
    )
    return function(x, w[0])


@pytest.mark.parametrize(
    ("function", "lengths"),
    [
        (scanned, (3,)),
        (jitted, ()),
        (mapped, (3,)),
        (mapped_twice, (3, 4)),
        (differentiated, ()),
        (with_rule, ()),
    ],
)
def test_marks_survive(function, lengths):
    closed = jax.make_jaxpr(function)(X, W)
    found = sites.find(closed, {1: "w"}).contractions
    site, *others = found
    assert site.mark == PRODUCT and all(one.mark is None for one in others)
    assert site.lengths == lengths
    assert [atom.aval.shape for atom in site.eqn.invars][-1] == (8, 8)
    assert site.operands[1].identity is not None
    assert (site.per_step[:1], site.per_step[1:]) == (
        (True,) * bool(lengths),
        (False,) * len(lengths[1:]),
    )


@pytest.mark.parametrize("function", [scanned, mapped_twice, with_rule])
def test_what_is_marked_is_replaced_with_arrays_of_each_call(function):
    """Each mapped call is given arrays of its own, and leaves some, as steps are."""
    closed = jax.make_jaxpr(function)(X, W)
    (site,) = sites.find(closed, {1: "w"}).contractions
    count = 3 if site.lengths else 1
    given = jnp.arange(1.0, count + 1) if site.lengths else jnp.float32(1)

    def twice(values, factor):
        x, w = values
        return [2 * (x @ w)], (w * factor).sum()

    one = Replacement(twice, given, has_aux=True, per_step=site.per_step)
    values = [X, W]
    (out,), aux = rewriting.evaluate(closed, values, {site.location: one})
    factors = np.arange(1, count + 1)
    wanted = np.asarray(W[:count].sum((1, 2))) * factors
    np.testing.assert_allclose(np.ravel(aux[site.location]), wanted, rtol=1e-5)
    if function is not scanned:
        np.testing.assert_allclose(out, 2 * function(X, W), rtol=1e-5)
