"""Logits of decoders, against those of the model's own package from the same file."""

import jax
import jax.numpy as jnp
import pytest

from aqtlite import kv_cache, llm
from tests.llm.support import FAMILIES, FOLDER, check_close, logits_of, reference

pytestmark = pytest.mark.code("quick")


def by_token(decoder, tokens):
    """Logits of tokens that are given one after the other."""
    steps = [
        logits_of(decoder, tokens[:, i : i + 1], i) for i in range(tokens.shape[1])
    ]
    return jnp.concatenate(steps, axis=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family):
    tokens, wanted = reference(family)
    decoder = llm.load(FOLDER / family).decoder
    check_close(logits_of(decoder, jnp.asarray(tokens)), wanted)


@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
def test_decoding_token_by_token_is_the_full_forward(family):
    tokens, wanted = reference(family)
    decoder = llm.load(FOLDER / family).decoder
    decoder.init_caches(1, tokens.shape[1])
    check_close(by_token(decoder, jnp.asarray(tokens)), wanted)


def test_float16():
    """`jax.nn.dot_product_attention` of float16 is not compiled for CPUs."""
    tokens, wanted = reference("mistral")
    tokens = jnp.asarray(tokens)
    decoder = llm.load(FOLDER / "mistral", dtype=jnp.float16).decoder
    decoder.init_caches(1, tokens.shape[1])
    model, variables = llm.load_linen(FOLDER / "mistral", dtype=jnp.float16)
    for got in (by_token(decoder, tokens), jax.jit(model.apply)(variables, tokens)):
        assert got.dtype == jnp.float16
        check_close(got.astype(jnp.float32), wanted, 0.02)


def test_a_quantized_cache_with_a_window_decodes_as_at_once():
    tokens, wanted = reference("mistral")
    decoder = llm.load(FOLDER / "mistral").decoder
    cfg, count = kv_cache.config_for(8), tokens.shape[1]
    decoder.init_caches(1, count, cfg, at_once=count)
    at_once = logits_of(decoder, jnp.asarray(tokens))
    decoder.init_caches(1, count, cfg)
    assert decoder.layers[0].attention.cached.cache.get_value().length == 5
    check_close(by_token(decoder, jnp.asarray(tokens)), at_once, 1e-5)
    check_close(at_once, wanted, 0.05)
