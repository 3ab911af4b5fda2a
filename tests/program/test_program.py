"""Frozen weights of traced functions are found where they belong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import Rule, config
from tests.common import left_in_float, normal

pytestmark = pytest.mark.code("quick")

INT8 = config.fully_quantized()


def test_one_parameter_contracted_in_several_ways():
    """Along other axes, and by other configs."""

    def fn(w, x):
        along_columns = jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))
        return x @ w, along_columns, x @ w

    rules = [Rule(path="#2", cfg=config.w4a8()), Rule(cfg=INT8)]
    quantized = aqtlite.quantize_function(fn, rules, params=0)
    w = normal((8, 8)) * jnp.arange(1, 9)
    x = normal((2, 8), 1)
    serve, serving = aqtlite.convert_function(quantized, w, x)
    assert not left_in_float(serving["params"])
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.jit(serve)(serving, x),
        jax.jit(quantized)(w, x),
    )
