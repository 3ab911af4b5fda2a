"""Keras on JAX, quantized through `stateless_call` with no line of it changed."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

import aqtlite
from aqtlite import config
from tests.common import normal
from tests.models.support import assert_trained_alike, trained

pytestmark = pytest.mark.slow

X = normal((8, 6, 6, 2))
WANTED = normal((8, 4), seed=1)
PATHS = [
    "conv2d",
    "depthwise_conv2d",
    "dense",
    "multi_head_attention/query/abc,cde->abde",
    "multi_head_attention/key/abc,cde->abde",
    "multi_head_attention/value/abc,cde->abde",
    "multi_head_attention/BTNH,BSNH->BNTS",
    "multi_head_attention/BNTS,BSNH->BTNH",
    "multi_head_attention/attention_output/abcd,cde->abe",
    "einsum_dense/abc,cd->abd",
    "dense_1",
]


def made() -> keras.Model:
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    given = keras.Input(X.shape[1:])
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(given)
    x = layers.BatchNormalization()(layers.DepthwiseConv2D(3, padding="same")(x))
    x = layers.Dense(16)(layers.Reshape((36, 8))(x))
    x = x + layers.MultiHeadAttention(2, 8)(x, x)
    x = x + layers.EinsumDense("abc,cd->abd", output_shape=(36, 16))(x)
    return keras.Model(given, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))


def test_trained_and_served():
    model = made()
    variables = tuple(
        [jnp.asarray(one.value) for one in some]
        for some in (model.trainable_variables, model.non_trainable_variables)
    )

    def call(variables, x):
        return model.stateless_call(*variables, x)[0]

    quantized = aqtlite.quantize_function(call, config.fully_quantized(), params=0)
    planned = aqtlite.plan(call, variables, X, rules=config.fully_quantized(), params=0)
    assert [one.path for one in planned.quantized()] == PATHS
    assert len(planned.contractions) == len(PATHS)

    def loss_of(call):
        return lambda params: jnp.mean((call((params, variables[1]), X) - WANTED) ** 2)

    params, losses = trained(loss_of(quantized), variables[0])
    _, in_float = trained(loss_of(call), variables[0])
    assert_trained_alike(losses, in_float)
    variables = params, variables[1]
    serve, serving = aqtlite.convert_function(quantized, variables, X)
    out, served = jax.jit(quantized)(variables, X), jax.jit(serve)(serving, X)
    np.testing.assert_array_equal(served, out)


def test_training_updates_statistics():
    """Of a batch normalization, which `stateless_call` returns."""
    model = made()

    def call(params, others, x):
        return model.stateless_call(params, others, x, training=True)

    quantized = aqtlite.quantize_function(call, config.fully_quantized(), params=0)
    params, others = (
        [jnp.asarray(one.value) for one in some]
        for some in (model.trainable_variables, model.non_trainable_variables)
    )
    _, after = jax.jit(quantized)(params, others, X)
    _, wanted = jax.jit(call)(params, others, X)
    for new, old, in_float in zip(after, others, wanted, strict=True):
        assert new.shape == old.shape
        np.testing.assert_allclose(new, in_float, rtol=0.05, atol=0.05)
