"""A decoder has the same bits however its tokens are given to it."""

import functools

import jax
import numpy as np
import pytest

from aqtlite import invariant
from tests.invariance import decoder

apply = jax.jit(invariant(decoder.apply))
TOKENS = decoder.tokens()


@functools.cache
def trained(dtype):
    """Parameters, and log-probabilities of the whole batch in a training step."""
    params = decoder.parameters(dtype=dtype)
    step = jax.jit(jax.value_and_grad(invariant(decoder.loss), has_aux=True))
    (_, out), _ = step(params, TOKENS)
    return params, np.asarray(out)


def decoded(params, dtype, chunk, size, first=0, batch=3):
    """Log-probabilities by a cache, some tokens at a time."""
    kept, out = decoder.cache(batch, size, dtype), []
    for start in range(0, TOKENS.shape[1], chunk):
        some = TOKENS[:batch, start : start + chunk]
        found, kept = apply(
            params, some, np.int32(first + start), np.int32(first), kept
        )
        out.append(np.asarray(found))
    return np.concatenate(out, 1)


CASES = {
    "token by token": ("float32", {"chunk": 1, "size": 21}),
    "one example": ("float32", {"chunk": 1, "size": 21, "batch": 1}),
    "left padding": ("float32", {"chunk": 5, "size": 40, "first": 9}),
    "bfloat16": ("bfloat16", {"chunk": 7, "size": 33, "batch": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_decoded_as_trained(name):
    dtype, how = CASES[name]
    params, wanted = trained(dtype)
    out = decoded(params, dtype, **how)
    np.testing.assert_array_equal(out, wanted[: out.shape[0]])


@pytest.mark.slow
@pytest.mark.parametrize("length", [8])
def test_prefixes_of_any_length(length):
    params, wanted = trained("float32")
    out, _ = apply(params, TOKENS[:1, :length])
    np.testing.assert_array_equal(out, wanted[:1, :length])
