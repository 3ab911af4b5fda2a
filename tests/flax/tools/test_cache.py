"""The quantized KV cache, in Flax's attention layers and without modules."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization

from aqtlite import calibration, config, kv_cache, numerics
from aqtlite.flax import QuantizedCache, quantize_model
from tests.common import assert_same, normal, quick_jit, relative_error
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

INT8 = config.qat(8)
INT4 = config.update(INT8, {"fwd.rhs.numerics": numerics.IntSymmetric(bits=4)})
HEADS, LENGTH, WIDTH = 2, 6, 16
LAYER = nn.MultiHeadDotProductAttention(HEADS, attention_fn=QuantizedCache(INT8))
X = normal((2, LENGTH, WIDTH))
CAUSAL = nn.make_causal_mask(jnp.ones((2, LENGTH)))


@functools.cache
def variables():
    return init(LAYER, X)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def step(layer, params, cache, x):
    out, updated = layer.apply({"params": params, "cache": cache}, x, mutable=["cache"])
    return updated["cache"], out


def decode(layer, x, cache, sizes=(1,) * LENGTH):
    """Takes the positions in pieces of these sizes."""
    outs, start = [], 0
    cache = jax.tree.map(jnp.copy, cache)
    for size in sizes:
        piece = x[..., start : start + size, :]
        cache, out = step(layer, variables()["params"], cache, piece)
        outs.append(out)
        start += size
    return jnp.concatenate(outs, -2), cache


@functools.cache
def decoded():
    return decode(LAYER, X, variables()["cache"])


def test_the_parameters_are_those_of_flax():
    layer = nn.MultiHeadDotProductAttention(HEADS, decode=True)
    plain = jax.eval_shape(layer.init, jax.random.key(0), X)
    ours = jax.eval_shape(LAYER.init, jax.random.key(0), X)
    assert jax.tree.structure(plain["params"]) == jax.tree.structure(ours["params"])
    assert set(plain["cache"]) == set(ours["cache"])
    for name in ("cached_key", "cached_value"):
        cached = ours["cache"][name]
        assert cached.shape == plain["cache"][name].shape == (2, LENGTH, HEADS, 8)
        assert (cached.qvalue.dtype, cached.scale.size) == (jnp.int8, 2 * LENGTH * 2)


def test_decoding_is_causal_attention_within_the_error_of_the_grid():
    plain = nn.MultiHeadDotProductAttention(HEADS)
    wanted = plain.apply({"params": variables()["params"]}, X, mask=CAUSAL)
    out, cache = decoded()
    assert 0 < relative_error(out, wanted) < 0.03
    assert int(cache["cache_index"]) == LENGTH


@pytest.mark.code("users")
def test_a_prompt_in_one_call_gives_what_single_positions_give():
    out, cache = decode(LAYER, X, variables()["cache"], (4, 1, 1))
    wanted, wanted_cache = decoded()
    assert_same(cache, wanted_cache)
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.code("users")
def test_through_scan_and_vmap():
    cache, params = variables()["cache"], variables()["params"]

    def one(cache, x):
        out, updated = LAYER.apply(
            {"params": params, "cache": cache}, x, mutable=["cache"]
        )
        return updated["cache"], out

    def scanned(cache, xs):
        return jax.lax.scan(one, cache, xs)

    both = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), cache)
    xs = jnp.moveaxis(jnp.stack([X, -X]), 2, 1)[:, :, :, None]
    after, out = jax.jit(jax.vmap(scanned))(both, xs)
    wanted, wanted_cache = decoded()
    first = jax.tree.map(lambda leaf: leaf[0], after)
    assert_same(first, wanted_cache)
    np.testing.assert_allclose(
        jnp.moveaxis(out[0, :, :, 0], 0, 1), wanted, rtol=1e-5, atol=1e-6
    )


@pytest.mark.code("users")
def test_vmap_over_a_cache_made_outside():
    """Over batch axes, in a scan that carries the cache."""
    empty = kv_cache.empty((2, 4, 2, 8), jnp.float32, INT8)
    positions = normal((4, 2, 1, 2, 8))

    def one(cache, x):
        cache = kv_cache.append(cache, x, -x, INT8)
        return cache, kv_cache.attend(x, cache, INT8)

    axes = kv_cache.KVCache(0, 0, None)
    mapped = jax.vmap(one, in_axes=(axes, 0), out_axes=(axes, 0))
    wanted = jax.jit(lambda *args: jax.lax.scan(one, *args))(empty, positions)
    got = jax.jit(lambda *args: jax.lax.scan(mapped, *args))(empty, positions)
    assert_same(got, wanted)


def test_a_donated_cache_is_updated_in_place():
    cache = jax.tree.map(jnp.copy, variables()["cache"])
    given = cache["cached_key"].qvalue.unsafe_buffer_pointer()
    after, _ = step(LAYER, variables()["params"], cache, X[:, :1])
    assert after["cached_key"].qvalue.unsafe_buffer_pointer() == given
    assert cache["cached_key"].qvalue.is_deleted()


def test_is_saved_and_restored(tmp_path):
    _, cache = decoded()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "cache", cache)
    with ocp.StandardCheckpointer() as checkpointer:
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, cache)
        assert_same(checkpointer.restore(tmp_path / "cache", abstract), cache)
    data = serialization.to_bytes(cache)
    restored = serialization.from_bytes(variables()["cache"], data)
    assert_same(jax.tree.map(jnp.asarray, restored), cache)


@pytest.mark.parametrize(
    ("cfg", "limit"), [(INT8, 0.02), (INT4, 0.2), (config.weight_only(8), 0.01)]
)
def test_grouped_queries_and_masks(cfg, limit):
    """4 heads of queries for 2 of keys; values of another depth; no batch axes."""
    q, k, v = normal((5, 4, 8)), normal((5, 2, 8), 1), normal((5, 2, 3), 2)
    mask = normal((4, 5, 5), 3) > -1
    cache = kv_cache.empty((5, 2, 8), jnp.float32, cfg, value_depth=3)

    @quick_jit
    def attend(cache, q, k, v):
        cache = kv_cache.append(cache, k, v, cfg)
        return kv_cache.attend(q, cache, cfg, mask), kv_cache.attend(q, cache, cfg)

    causal = jnp.tril(jnp.ones((5, 5), bool))
    masked, plain = attend(cache, q, k, v)
    keys, values = (jnp.repeat(x, 2, axis=1) for x in (k, v))
    for got, wanted_mask in ((masked, mask & causal), (plain, causal)):
        wanted = nn.dot_product_attention(q, keys, values, mask=wanted_mask)
        assert got.shape == (5, 4, 3)
        assert 0 < relative_error(got, wanted) < limit


def test_a_nan_poisons_its_head_alone():
    cache = kv_cache.empty((3, 2, 4), jnp.float32, INT8)
    k = normal((2, 2, 4)).at[0, 1, 2].set(jnp.nan)

    @jax.jit
    def attend(cache, k):
        return kv_cache.attend(k, kv_cache.append(cache, k, k, INT8), INT8)

    is_nan = np.isnan(attend(cache, k))
    assert is_nan[:, 1].all() and not is_nan[:, 0].any()


class Twice(nn.Module):
    """Attends twice, to one cache."""

    @nn.compact
    def __call__(self, x):
        attention = QuantizedCache(INT8)
        return attention(x, x, x) + attention(x, -x, x)


class Inside(nn.Module):
    """Attends in a module with a name."""

    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(
            2, attention_fn=QuantizedCache(INT8), name="inner"
        )(x)


class TestBadInput:
    CACHE = jax.eval_shape(lambda: kv_cache.empty((4, 2, 8), jnp.float32, INT8))

    def test_an_overfull_cache(self):
        """An error, and NaN from there on where the index is not known."""

        @jax.jit
        def attend(cache, x):
            cache = kv_cache.append(cache, x, x, INT8)
            return cache, kv_cache.attend(x, cache, INT8)

        # Zeros for all leaves, scales included, are an empty cache as well.
        cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.CACHE)
        x, outs = jnp.ones((1, 2, 8)), []
        for _ in range(6):
            cache, out = attend(cache, x)
            outs.append(bool(jnp.isfinite(out).all()))
        assert outs == [True] * 4 + [False] * 2
        with pytest.raises(ValueError, match="room for 4 positions, 6 of .* 1 more"):
            kv_cache.append(cache, x, x, INT8)

    @pytest.mark.slow
    def test_an_overfull_cache_of_a_model_by_rules(self):
        """An error after an eager call, though the model is traced."""
        layer = nn.MultiHeadDotProductAttention(1, attention_fn=QuantizedCache(INT8))
        model = quantize_model(nn.Sequential([layer]), INT8)
        variables = init(model, jnp.ones((1, 2, 2)))
        step = functools.partial(model.apply, mutable=["cache"])
        x = jnp.ones((1, 1, 2))
        for call in (jax.jit(step), step):
            _, changed = call(variables, x)
            variables = {**variables, **changed}
        out, _ = jax.jit(step)(variables, x)
        assert jnp.isnan(out).all()
        message = "layers_0: the KV cache has room for 2 positions, .* given 3 in all"
        with pytest.raises(ValueError, match=message):
            step(variables, x)

    @pytest.mark.parametrize("index", [None, 0, 4])
    def test_more_positions_than_a_cache_is_long(self, index):
        """Whether or not it is known how many are written."""
        cache = kv_cache.empty((4, 2, 8), jnp.float32, INT8)
        x = jnp.ones((5, 2, 8))
        message = r"5 positions at once, and .* \(4, 2, 8\) .* has room for 4"

        def append(given, x):
            known = given if index is None else jnp.int32(index)
            return kv_cache.append(
                dataclasses.replace(cache, index=known), x, x, cfg=INT8
            )

        with pytest.raises(ValueError, match=message):
            jax.eval_shape(append, cache.index, x)

    def test_more_positions_than_a_cache_is_long_in_a_layer(self):
        x = jax.ShapeDtypeStruct((1, 6, 8), "float32")
        apply = functools.partial(Inside().apply, mutable=["cache"])
        made = Inside().init(jax.random.key(0), jnp.ones((1, 4, 8)))
        with pytest.raises(ValueError, match="^inner: 6 positions at once"):
            jax.eval_shape(apply, made, x)

    def test_integers_of_other_bits(self):
        """What restoring to the target of another config leaves."""
        cache = kv_cache.empty((4, 2, 8), jnp.float32, INT8)
        other = cache.key.qvalue.astype(jnp.int4)
        mixed = dataclasses.replace(
            cache, key=dataclasses.replace(cache.key, qvalue=other)
        )
        x = jax.ShapeDtypeStruct((1, 2, 8), "float32")
        append = functools.partial(kv_cache.append, cfg=INT8)
        with pytest.raises(ValueError, match="keys stored in int4.* is stored in int8"):
            jax.eval_shape(append, mixed, x, x)

    @pytest.mark.parametrize(
        ("shape", "dtype", "error", "match"),
        [
            ((1, 3, 8), "float32", ValueError, r"key of shape \(1, 3, 8\) does not"),
            ((2, 8), "float32", ValueError, r"key of shape \(2, 8\) does not fit"),
            ((1, 2, 8), "int32", TypeError, "key must be float32.*int32"),
        ],
    )
    def test_keys(self, shape, dtype, error, match):
        x = jax.ShapeDtypeStruct(shape, dtype)
        append = functools.partial(kv_cache.append, cfg=INT8)
        with pytest.raises(error, match=match):
            jax.eval_shape(append, self.CACHE, x, x)

    def test_queries_and_masks(self):
        def attend(query, mask):
            attend = functools.partial(kv_cache.attend, cfg=INT8)
            query = jax.ShapeDtypeStruct(query, "float32")
            mask = jax.ShapeDtypeStruct(mask, "bool")
            jax.eval_shape(attend, query, self.CACHE, mask=mask)

        with pytest.raises(ValueError, match=r"query of shape \(1, 3, 8\) does not"):
            attend((1, 3, 8), (1, 4))
        with pytest.raises(ValueError, match=r"mask of shape \(1, 3\) .* \(2, 1, 4\)"):
            attend((1, 2, 8), (1, 3))
        with pytest.raises(ValueError, match=r"mask of shape \(3, 1, 4\) .* \(2, 1"):
            attend((1, 2, 8), (3, 1, 4))

    def test_caches(self):
        with pytest.raises(ValueError, match=r"has the shape .*, got \(2, 8\)"):
            kv_cache.empty((2, 8), jnp.float32, INT8)
        x = jax.ShapeDtypeStruct((1, 2, 8), "float32")
        message = r"KV cache of shape \(4, 2, 8\) has keys of .*bits=8.*: bits"
        with pytest.raises(ValueError, match=message):
            append = functools.partial(kv_cache.append, cfg=INT4)
            jax.eval_shape(append, self.CACHE, x, x)
        with pytest.raises(ValueError, match=message):
            attend = functools.partial(kv_cache.attend, cfg=INT4)
            jax.eval_shape(attend, x, self.CACHE)

    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"fwd.rhs.use_fake_quant": True}, "leaves them in float"),
            ({"fwd.rhs.blocks": config.Blocks(size=4, pad=True)}, "divide a head"),
            ({"fwd.rhs.calib_shared_axes": "per_tensor"}, "for each position and head"),
            ({"fwd.lhs.calibration": calibration.MaxOverBatches()}, "needs statistics"),
            ({"fwd.smoothing": config.Smoothing()}, "past keys in integers"),
            ({"out": INT8.fwd.lhs}, "would quantize the scores"),
        ],
        ids=lambda x: x if isinstance(x, str) else "",
    )
    def test_configs_that_no_cache_has(self, changes, match):
        with pytest.raises(ValueError, match=match):
            QuantizedCache(config.update(INT8, changes))
        with pytest.raises(TypeError, match="takes a config.DotGeneral, got 8"):
            QuantizedCache(8)

    def test_in_modules(self):
        params, fn = variables()["params"], QuantizedCache(INT8)
        with pytest.raises(ValueError, match="has no 'cached_key' in the collection"):
            LAYER.apply({"params": params}, X)
        with pytest.raises(ValueError, match=r"called without mutable=\['cache'\]"):
            jax.eval_shape(LAYER.apply, variables(), X)
        both = nn.MultiHeadDotProductAttention(HEADS, attention_fn=fn, decode=True)
        with pytest.raises(TypeError, match="in place of decode=True"):
            jax.eval_shape(both.init, jax.random.key(0), X)
        with pytest.raises(ValueError, match="the root module calls .* second time"):
            jax.eval_shape(Twice().init, jax.random.key(0), normal((1, 4, 2, 8)))
        dropout = LAYER.clone(dropout_rate=0.5, deterministic=False)
        with pytest.raises(ValueError, match="dropout_rate=0.5 was asked"):
            jax.eval_shape(dropout.init, jax.random.key(0), X)
        q = normal((1, 2, 4))
        with pytest.raises(ValueError, match="outside a Flax module"):
            fn(q, q, q)
