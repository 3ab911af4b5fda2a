"""Presets whose scales no other position and no other example of a batch sees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import config
from tests.common import mostly_slow, normal, quick_jit

pytestmark = pytest.mark.code("quick")

APART = {
    "fully_quantized": config.fully_quantized(use_stochastic_rounding=False),
    "fp8": config.fp8(),
    "block_fp8": config.block_fp8(16),
    "mxfp8": config.mxfp8(),
    "mxfp6": config.mxfp6(),
    "mxint8": config.mxint8(),
    "mxfp4": config.mxfp4(),
    "nvfp4": config.nvfp4(),
}
TOGETHER = {
    "fp8": config.fp8(per_tensor=True),
    "nvfp4": config.nvfp4(per_tensor=True),
}
# Batch, positions, features by features, new features.
DENSE = (((2,), (0,)), ((), ()))


@functools.partial(quick_jit, static_argnums=0)
def run(cfg, x, w, g):
    """The result, and the gradient of the activations."""
    dot = aqtlite.make_dot_general(cfg)
    out, pullback = jax.vjp(lambda x: dot(x, w, DENSE), x)
    return out, pullback(g)[0]


def arguments():
    x, g = normal((2, 4, 64)), normal((2, 4, 48), 1)
    return x, normal((64, 48), 2), g


@pytest.mark.parametrize("name", mostly_slow(APART, "fp8", "nvfp4", "block_fp8"))
def test_loud_neighbours_change_nothing(name):
    x, w, g = arguments()
    # Later positions of the first example, and all of the second.
    loud = jnp.ones((2, 4, 1)).at[0, 2:].set(100).at[1].set(1000)
    alone, beside = run(APART[name], x, w, g), run(APART[name], x * loud, w, g * loud)
    for one, other in zip(alone, beside, strict=True):
        np.testing.assert_array_equal(one[0, :2], other[0, :2])
        assert (one[0, 2:] != other[0, 2:]).any()


@pytest.mark.parametrize("name", TOGETHER)
def test_one_scale_per_tensor_couples_examples(name):
    x, w, g = arguments()
    loud = jnp.ones((2, 1, 1)).at[1].set(1000)
    alone = run(TOGETHER[name], x, w, g)
    beside = run(TOGETHER[name], x * loud, w, g * loud)
    for one, other in zip(alone, beside, strict=True):
        assert (one[0] != other[0]).any()
