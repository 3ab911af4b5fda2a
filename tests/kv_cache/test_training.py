"""The attention of training is that of the cache, bit for bit."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import aqtlite
from aqtlite import config, kv_cache
from aqtlite.flax import QuantizedCache, map_caches, quantize_model
from aqtlite.flax import nnx as aqtlite_nnx
from aqtlite.flax.linen.tools.cache import check_room
from tests.common import normal
from tests.flax.support import init

CFG = config.fully_quantized()
LENGTH, WIDTH, HEADS = 5, 16, 2


def layer(dtype, **fields):
    return quantize_model(
        nn.MultiHeadDotProductAttention(HEADS, dtype=dtype, **fields), CFG
    )


@functools.cache
def trained(dtype):
    """Input, parameters, and the result inside of a gradient."""
    x = normal((2, LENGTH, WIDTH)).astype(dtype)
    model = layer(dtype)
    variables = init(model, x)
    mask = nn.make_causal_mask(x[..., 0])

    @aqtlite.invariant
    def loss(params, x):
        out = model.apply({"params": params}, x, mask=mask)
        return (out.astype(jnp.float32) ** 2).sum(), out

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, out), _ = step(variables["params"], x)
    return x, variables["params"], np.asarray(out.astype(jnp.float32))


def decoded(model, params, x):
    """Position by position."""
    cache = init(model, x)["cache"]

    @jax.jit
    @aqtlite.invariant
    def step(cache, x):
        given = {"params": params, "cache": cache}
        out, changed = model.apply(given, x, mutable=["cache"])
        return changed["cache"], out.astype(jnp.float32)

    outs = []
    for i in range(x.shape[1]):
        cache, out = step(cache, x[:, i : i + 1])
        outs.append(out)
    return np.concatenate(outs, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("float", "bfloat16"), ("quantized", "float32"), ("quantized", "bfloat16")],
)
def test_linen(kind, dtype):
    x, params, wanted = trained(dtype)
    fields = {"decode": True}
    if kind == "quantized":
        fields = {"attention_fn": QuantizedCache(CFG)}
    np.testing.assert_array_equal(decoded(layer(dtype, **fields), params, x), wanted)


class TestNnx:
    @staticmethod
    def layer(**fields):
        return nnx.MultiHeadAttention(HEADS, WIDTH, rngs=nnx.Rngs(0), **fields)

    @staticmethod
    def run(model, *args, **kwargs):
        graph, state = nnx.split(aqtlite_nnx.quantize_model(model, CFG))

        @jax.jit
        @aqtlite.invariant
        def call(state, *args):
            merged = nnx.merge(graph, state)
            out = merged(*args, **kwargs)
            return out, nnx.state(merged)

        return call, state

    def decoded(self, model, x):
        call, state = self.run(model)
        outs = []
        for i in range(LENGTH):
            out, state = call(state, x[:, i : i + 1])
            outs.append(out)
        return np.concatenate(outs, 1)

    @pytest.mark.slow
    def test_float_and_quantized_caches(self):
        x = normal((2, LENGTH, WIDTH))
        mask = nnx.make_causal_mask(x[..., 0])
        call, state = self.run(self.layer(decode=False), mask=mask)
        wanted, _ = call(state, x)
        by_rules = self.layer(decode=True)
        by_rules.init_cache(x.shape)
        np.testing.assert_array_equal(self.decoded(by_rules, x), wanted)
        cache = aqtlite_nnx.QuantizedCache(CFG)
        quantized = self.layer(decode=False, attention_fn=cache)
        call, state = self.run(quantized, mask=mask)
        np.testing.assert_array_equal(call(state, x)[0], wanted)
        cache.init_cache((2, LENGTH, HEADS, WIDTH // HEADS))
        np.testing.assert_array_equal(self.decoded(quantized, x), wanted)

    def test_bad_input(self):
        with pytest.raises(TypeError, match="takes a config.DotGeneral, got 8"):
            aqtlite_nnx.QuantizedCache(8)
        cache = aqtlite_nnx.QuantizedCache(kv_cache.config_for(4), window=2)
        cache.init_cache((1, 3, 2, 8), value_depth=5)
        x = jnp.ones((1, 3, 2, 8))
        with pytest.raises(ValueError, match="3 positions at once"):
            cache(x, x, x[..., :5])
        with pytest.raises(ValueError, match=r"dropout_rate=0.1 was asked"):
            cache(x, x, x, dropout_rate=0.1, deterministic=False)


class TestCollections:
    """Caches in Linen's collections."""

    LAYER = nn.MultiHeadDotProductAttention(
        HEADS, attention_fn=QuantizedCache(kv_cache.config_for(4))
    )

    def test_prompts_of_other_lengths(self):
        model = nn.Sequential([self.LAYER])
        x = normal((2, LENGTH, WIDTH))
        variables = init(model, x)

        @jax.jit
        def step(cache, x):
            given = {"params": variables["params"], "cache": cache}
            out, changed = model.apply(given, x, mutable=["cache"])
            return changed["cache"], out

        cache, whole = step(variables["cache"], x)
        cut = map_caches(lambda one: kv_cache.truncate(one, [2, 4]), cache)
        assert cut["layers_0"]["cache_index"].tolist() == [2, 4]
        taken = jnp.stack([x[0, 2], x[1, 4]])[:, None]
        _, out = step(cut, taken)
        np.testing.assert_allclose(out[0, 0], whole[0, 2], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(out[1, 0], whole[1, 4], rtol=1e-5, atol=1e-6)
        with pytest.raises(ValueError, match="window=3 is not that of a cache"):
            map_caches(lambda one: one, cache, window=3)

    def test_a_ring(self):
        """It is never full, for the check of eager calls, either."""
        ring = QuantizedCache(kv_cache.config_for(4), window=2)
        model = quantize_model(
            nn.MultiHeadDotProductAttention(HEADS, attention_fn=ring), CFG
        )
        variables = init(model, normal((1, 3, WIDTH)))
        step = jax.jit(functools.partial(model.apply, mutable=["cache"]))
        for _ in range(5):
            out, changed = step(variables, normal((1, 1, WIDTH)))
            variables = {**variables, **changed}
        assert np.isfinite(out).all() and int(changed["cache"]["ring_index"]) == 5
        check_room(changed["cache"])
        other = nn.MultiHeadDotProductAttention(HEADS, attention_fn=QuantizedCache())
        with pytest.raises(ValueError, match="another window"):
            other.apply(variables, normal((1, 1, WIDTH)), mutable=["cache"])
