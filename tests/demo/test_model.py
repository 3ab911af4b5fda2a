"""The demo's transformer, and generating from it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite import config
from aqtlite_demo import generate
from aqtlite_demo.model import Transformer
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

CONFIGS = [None, config.fully_quantized(fwd_bits=8, bwd_bits=8)]


@functools.cache
def _model(cfg):
    model = Transformer(layers=1, width=16, heads=2, length=12, cfg=cfg)
    tokens = np.random.default_rng(0).integers(0, 256, (2, 12), np.int32)
    return model, init(model, tokens), tokens


@pytest.mark.parametrize("cfg", CONFIGS)
def test_is_causal(cfg):
    model, variables, tokens = _model(cfg)
    apply = jax.jit(model.apply)
    logits = apply(variables, tokens)
    assert logits.shape == (2, 12, 256)
    changed = apply(variables, np.where(np.arange(12) < 6, tokens, 0))
    np.testing.assert_array_equal(logits[:, :6], changed[:, :6])
    assert not np.array_equal(logits[:, 6:], changed[:, 6:])


@pytest.mark.parametrize(
    ("cfg", "dtype", "atol"),
    [
        (None, "float32", 1e-5),
        # A rounding that falls the other way moves a quantized activation by one step.
        (CONFIGS[1], "float32", 2e-2),
        (CONFIGS[1], "int8", 1e-1),
    ],
)
def test_decoding_agrees_with_the_whole_sequence(cfg, dtype, atol):
    model, variables, tokens = _model(cfg)
    decoder = model.clone(decode=True, cache=generate.cache_config(dtype))
    step = jax.jit(functools.partial(decoder.apply, mutable=["cache"]))
    cache = generate.init_cache(decoder)
    logits = []
    for i in range(12):
        out, updated = step({**variables, "cache": cache}, tokens[:1, i : i + 1])
        cache = updated["cache"]
        logits.append(out)
    expected = jax.jit(model.apply)(variables, tokens[:1])
    np.testing.assert_allclose(jnp.concatenate(logits, 1), expected, atol=atol)


def test_generates_what_was_asked_for_and_follows_the_seed():
    model, variables, tokens = _model(None)
    prompt = np.asarray(tokens[0, :4])
    sampled, seconds = generate.generate(model, variables, prompt, 8, seed=0)
    again, _ = generate.generate(model, variables, prompt, 8, seed=0)
    other, _ = generate.generate(model, variables, prompt, 8, seed=1)
    assert sampled.shape == (8,)
    assert seconds > 0
    np.testing.assert_array_equal(sampled, again)
    assert not np.array_equal(sampled, other)
