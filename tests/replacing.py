"""Evaluation of functions with every contraction replaced by itself."""

import jax
import numpy as np

from aqtlite.jaxpr import rewriting, sites
from aqtlite.jaxpr.replacement import Replacement


def itself(site):
    """A replacement that computes what was there, by the same primitive."""
    eqn = site.eqn

    def function(values, given):
        return [eqn.primitive.bind(*values, **eqn.params)], given

    return Replacement(function, per_step=site.per_step)


def replaced(function, replacement=itself):
    """A function that is traced, and evaluated with its contractions replaced.

    Args:
        function: takes arrays in lists, tuples and dictionaries.
        replacement: makes the replacement of a `Site`.
    """

    def evaluate(*args):
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        found = [one for one in sites.find(closed).contractions if one.obstacle is None]
        replacements = {one.location: replacement(one) for one in found}
        out, _ = rewriting.evaluate(closed, jax.tree.leaves(args), replacements)
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return evaluate


def evaluated_with(function, replacement, *args):
    """What such a function returns, and what its replacements left."""
    closed = jax.make_jaxpr(function)(*args)
    replacements = {
        one.location: replacement(one) for one in sites.find(closed).contractions
    }
    return rewriting.evaluate(closed, jax.tree.leaves(args), replacements)


def data(x):
    """The numbers of an array, those of keys too."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def assert_bits(got, wanted):
    """Equal trees of equal arrays, NaN and dtypes included."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(data(a), data(b))
