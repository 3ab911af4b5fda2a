"""States of calibrations in quantized functions, and in what they serve."""

import jax
import numpy as np
import pytest

from aqtlite import (
    config,
    convert_function,
    quantize_function,
    with_gradient_statistics,
)
from tests.common import normal

pytestmark = pytest.mark.code("quick")

W = normal((8, 4))
X = normal((2, 8), 1)


def test_learned_scales_of_activations_are_served():
    quantized = quantize_function(lambda w, x: x @ w, config.lsq(8), params=0)
    state = quantized.init_state(W, X)
    out, _ = jax.jit(quantized)(state, W, X)
    serve, serving = convert_function(quantized, W, X, state=state)
    np.testing.assert_array_equal(jax.jit(serve)(serving, X), out)


def test_evaluation_leaves_statistics_as_they_are():
    quantized = quantize_function(lambda w, x: x @ w, config.static_int8(), params=0)
    _, state = quantized(quantized.init_state(W, X), W, X)
    clipped = quantized.evaluate(state, (W, 4 * X), {})
    serve, serving = convert_function(quantized, W, X, state=state)
    np.testing.assert_array_equal(serve(serving, 4 * X), clipped)
    assert (clipped != quantized(state, W, 4 * X)[0]).any()


def test_gather_names_arguments_that_come_before_the_state():
    quantized = quantize_function(lambda w, x: x @ w, config.static_int8(), params=0)
    state = quantized.init_state(W, X)
    message = (
        r"gather\(state, \*args\) takes a state .* got dict\('w': float32\[8,4\]\)"
    )
    with pytest.raises(TypeError, match=message):
        quantized.gather({"w": W}, state, X)
    with pytest.raises(TypeError, match=r"takes a state .* got float32\[8,4\]"):
        quantized.gather(W, state, X)


def test_gradient_without_statistics_has_none_to_put_in_place():
    quantized = quantize_function(lambda w, x: x @ w, config.static_int8(), params=0)
    state = quantized.init_state(W, X)
    with pytest.raises(ValueError, match="gradient .* of 'aqt_stats'"):
        with_gradient_statistics(state, state)
