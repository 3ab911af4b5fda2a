"""Attention masks leave the other elements their integers, however they are made."""

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite import edge
from tests.common import inside_shard_map
from tests.edge import models

pytestmark = pytest.mark.code("quick")

_SMALLEST = float(np.finfo(np.float32).min)
_TRIANGLE = np.tril(np.ones((6, 6), np.float32))

MASKS = {
    "a product": lambda s, keep: s + (1.0 - keep) * -1e4,
    "a large product": lambda s, keep: s + (1.0 - keep) * -1e9,
    "a difference": lambda s, keep: s - 1e4 * (1.0 - keep),
    "a known sum": lambda s, keep: s + (1.0 - _TRIANGLE) * -1e4,
    "a known difference": lambda s, keep: s - 1e4 * (1.0 - _TRIANGLE),
    "not far below": lambda s, keep: s - 100.0 * (1.0 - _TRIANGLE),
    "of two masks": lambda s, keep: s + ((1.0 - keep) + (1.0 - _TRIANGLE)) * -1e9,
    "a bias with positions": lambda s, keep: (
        s + (jnp.cos(jnp.arange(6.0)) + (1.0 - keep) * -1e9)
    ),
}


def _attention(masked):
    def model(w, x, keep):
        scores = jnp.einsum("bqd,bkd->bqk", x @ w, x) / 3.0
        weights = nn.softmax(masked(scores, keep))
        return jnp.einsum("bqk,bkd->bqd", weights, x)

    return model


_W, _X = models.normal((8, 8), 1), models.normal((2, 6, 8), 2)
_KEEP = (jnp.arange(6) < jnp.array([[4], [6]])).astype(jnp.float32)[:, None]


def _decibels(expected, found) -> float:
    noise = np.square(expected - found).sum()
    return float(10 * np.log10(np.square(expected).sum() / noise))


def _check(path, model, variables, *args):
    ranges = edge.calibrate(model, variables, [args])
    edge.export(model, variables, ranges, args, path, interface="float")
    simulation = edge.simulate(model, variables, ranges, args)
    (found,) = models.run(path, *args)
    predicted = simulation.dequantize(list(ranges)[-1], jax.jit(simulation)(*args))
    np.testing.assert_array_equal(found, predicted)
    assert _decibels(np.asarray(model(variables, *args)), found) > 28
    return ranges


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
def test_masks_that_are_added(tmp_path, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = tmp_path / "masked.tflite"
        _check(path, _attention(MASKS[name]), _W, _X, _KEEP)


def test_the_smallest_number_of_a_mask_of_integers(tmp_path):
    def model(w, x, keep):
        bias = jax.lax.select(
            jnp.broadcast_to(keep > 0, (2, 6, 6)),
            jnp.zeros((2, 6, 6)),
            jnp.full((2, 6, 6), _SMALLEST),
        )
        return _attention(lambda s, _: s + bias)(w, x, None)

    _check(tmp_path / "bias.tflite", model, _W, _X, _KEEP.astype(jnp.int32))


def test_a_mask_that_is_an_input(tmp_path):
    # As Flax takes it (`bias=`), and for two layers.
    def model(w, x, bias):
        for _ in range(2):
            x = _attention(lambda s, _: s + bias)(w, x, None)
        return x

    bias = jnp.where(_KEEP > 0, 0.0, -1e9) * jnp.ones((1, 6, 1))
    ranges = _check(tmp_path / "input.tflite", model, _W, _X, bias)
    assert -100 < ranges["input/1"].low < -10


def test_masked_elements_are_below_all_rows():
    # The second row is far below the first one.
    x = jnp.array([[20.0, 19.0, 18.0], [-5.0, -6.0, 3.0]])
    keep = jnp.array([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])

    def model(w, x, keep):
        return nn.softmax(w * x + (1.0 - keep) * -1e4)

    ranges = edge.calibrate(model, jnp.ones(3), [(x, keep)])
    assert ranges["add"] == pytest.approx((-15.0, 20.0))
    found = edge.fake_quantize(model, ranges)(jnp.ones(3), x, keep)
    assert found[1, 2] < 1e-3


def test_few_values_that_widen_a_range_are_named():
    x = models.normal((64, 8)).at[0, 0].set(1e4)
    with pytest.warns(UserWarning, match=r"round to zero.*\n  'input': \d+% in \["):
        edge.calibrate(lambda w, x: x @ w, jnp.eye(8), [x])


def test_inside_shard_map():
    def model(w, x, lengths):
        keep = jnp.arange(6) < lengths[:, None, None]
        return _attention(MASKS["a product"])(w, x, keep.astype(jnp.float32))

    args = _X, np.int32([4, 6])
    ranges = edge.calibrate(model, _W, [args])
    simulation = edge.simulate(model, _W, ranges, args)
    expected = jax.jit(simulation)(*args)
    np.testing.assert_array_equal(
        jax.jit(functools.partial(inside_shard_map, simulation))(*args), expected
    )
