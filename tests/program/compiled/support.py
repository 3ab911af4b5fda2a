"""What tests of serving programs share."""

import jax
import numpy as np

import aqtlite


def compiled_alike(function, serving, *args):
    """The serving program of a function, which gives what `jax.jit` of it does."""
    program = aqtlite.compile_serving(function, serving, *args)
    found, wanted = program(*args), jax.jit(function)(serving, *args)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other, strict=True)
    return program
