"""Frozen weights of traced functions are found where they belong."""

import jax
import jax.numpy as jnp
import numpy as np

import aqtlite
from aqtlite import Rule, config

INT8 = config.fully_quantized()


def test_one_parameter_contracted_in_several_ways():
    """Along other axes, and by other configs."""

    def fn(w, x):
        along_columns = jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))
        return x @ w, along_columns, x @ w

    rules = [Rule(path="#2", cfg=config.w4a8()), Rule(cfg=INT8)]
    quantized = aqtlite.quantize_function(fn, rules, params=0)
    w = jax.random.normal(jax.random.key(0), (8, 8)) * jnp.arange(1, 9)
    x = jax.random.normal(jax.random.key(1), (2, 8))
    serve, serving = aqtlite.convert_function(quantized, w, x)
    assert not jax.tree.leaves(serving["params"])
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.jit(serve)(serving, x),
        jax.jit(quantized)(w, x),
    )
