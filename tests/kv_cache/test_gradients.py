"""Gradients pass through keys and values in a cache as through any rounding."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import config, kv_cache
from aqtlite.flax import QuantizedCache
from tests.common import mostly_slow, nearest, normal
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

INT8 = config.qat(8)
CONFIGS = {
    "qat": INT8,
    "fully": nearest(),
    "weight_only": config.weight_only(8),
    "fp8": config.fp8(),
}
LENGTH = 6
OPERANDS = [normal((2, LENGTH, 2, 8), seed) for seed in range(3)]
CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))


def trained(cfg):
    """Attention to quantized keys and values as it is trained without a cache."""
    cfg = cfg.for_serving()

    def loss(query, key, value):
        query = query / np.sqrt(8).astype(np.float32)
        scores = aqtlite.einsum("bqhd,bkhd->bhqk", query, key, cfg=cfg)
        scores = jnp.where(CAUSAL, scores, jnp.finfo(jnp.float32).min)
        values = config.for_values(cfg)
        weights = jax.nn.softmax(scores)
        return (
            aqtlite.einsum("bhqk,bkhd->bqhd", weights, value, cfg=values) ** 2
        ).sum()

    return loss


def uncached(cfg):
    def loss(query, key, value):
        return (kv_cache.attend_uncached(query, key, value, cfg, CAUSAL) ** 2).sum()

    return loss


def cached(cfg, sizes=(LENGTH,), between=lambda cache: cache):
    """Attention by pieces of these sizes to a cache."""

    def loss(query, key, value):
        cache = kv_cache.empty(key.shape, key.dtype, cfg)
        total, start = 0.0, 0
        for size in sizes:
            there = slice(start, start + size)
            cache = kv_cache.append(between(cache), key[:, there], value[:, there], cfg)
            total += (kv_cache.attend(query[:, there], cache, cfg) ** 2).sum()
            start += size
        return total

    return loss


def gradients(loss):
    return jax.grad(loss, argnums=(0, 1, 2))


def assert_close(one, other):
    for got, wanted in zip(one, other, strict=True):
        assert np.abs(wanted).max() > 0.1
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("cfg", mostly_slow(CONFIGS.values(), INT8))
def test_they_are_those_of_attention_in_training(cfg):
    wanted = jax.jit(gradients(trained(cfg)))(*OPERANDS)
    for loss in (uncached(cfg), cached(cfg)):
        assert_close(jax.jit(gradients(loss))(*OPERANDS), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        lambda loss: gradients(jax.jit(loss)),
        lambda loss: jax.jit(gradients(jax.checkpoint(loss))),
    ],
    ids=["of_jit", "checkpoint"],
)
def test_position_by_position(how):
    wanted = jax.jit(gradients(uncached(INT8)))(*OPERANDS)
    assert_close(how(cached(INT8, (3, 1, 2)))(*OPERANDS), wanted)


def test_what_is_decoded_keeps_no_floats():
    cache = kv_cache.empty(OPERANDS[1].shape, jnp.float32, INT8)
    after = kv_cache.append(cache, *OPERANDS[1:], INT8)
    assert after.floats is None
    assert jax.tree.structure(after) == jax.tree.structure(cache)
    jitted = jax.jit(lambda *args: kv_cache.append(*args, INT8))
    assert jitted(cache, *OPERANDS[1:]).floats is None


def scanned(query, key, value):
    """Position by position in a scan that carries the cache."""

    def step(cache, positions):
        one, *new = (x[:, None] for x in positions)
        cache = kv_cache.append(cache, *new, INT8)
        return cache, (kv_cache.attend(one, cache, INT8) ** 2).sum()

    empty = kv_cache.empty(key.shape, key.dtype, INT8)
    xs = [jnp.moveaxis(x, 1, 0) for x in (query, key, value)]
    return jax.lax.scan(step, empty, xs)[1].sum()


LOST = "written to a KV cache before it left a transformation"


@pytest.mark.parametrize(
    "loss",
    [scanned, cached(INT8, (4, 2), between=jax.jit(lambda cache: cache))],
    ids=["scan", "jit"],
)
@pytest.mark.parametrize(
    "how",
    [pytest.param(lambda f: f, marks=pytest.mark.slow), jax.jit],
    ids=["eager", "jit"],
)
def test_what_a_cache_has_lost_is_refused(loss, how):
    with pytest.raises(TypeError, match=LOST):
        how(gradients(loss))(*OPERANDS)
    # The queries of all positions are there.
    wanted = jax.jit(jax.grad(uncached(INT8)))(*OPERANDS)
    assert_close([jax.jit(jax.grad(loss))(*OPERANDS)], [wanted])


def test_what_was_written_before_may_be_constant():
    stopped = cached(INT8, (4, 2), between=jax.lax.stop_gradient)
    _, of_keys, _ = jax.jit(gradients(stopped))(*OPERANDS)
    whole = jax.jit(gradients(uncached(INT8)))(*OPERANDS)[1]
    assert (np.asarray(of_keys) != 0).any((0, 2, 3)).all()
    np.testing.assert_allclose(of_keys[:, 4:], whole[:, 4:], rtol=1e-3, atol=1e-4)
    assert (np.abs(of_keys - whole).max((0, 2, 3))[:4] > 1e-2).all()


@pytest.mark.slow
def test_caches_of_scanned_layers_are_results():
    """Each of a scan's steps has one, and its last result is differentiated."""

    def loss(x):
        def layer(x, _):
            empty = kv_cache.empty(x.shape, x.dtype, INT8)
            cache = kv_cache.append(empty, x, x, INT8)
            return kv_cache.attend(x, cache, INT8), cache

        out, caches = jax.lax.scan(layer, x, None, length=2)
        return (out**2).sum(), caches

    def unrolled(x):
        for _ in range(2):
            x = kv_cache.attend_uncached(x, x, x, INT8, CAUSAL)
        return (x**2).sum()

    found, caches = jax.jit(jax.grad(loss, has_aux=True))(OPERANDS[1])
    assert caches.key.shape == (2, 2, LENGTH, 2, 8)
    assert_close([found], [jax.jit(jax.grad(unrolled))(OPERANDS[1])])


class TestLinen:
    LAYER = nn.MultiHeadDotProductAttention(2, attention_fn=QuantizedCache(INT8))
    X = normal((2, LENGTH, 16))

    @staticmethod
    def _attention(query, key, value, mask=None, **kwargs):
        return kv_cache.attend_uncached(query, key, value, INT8, CAUSAL)

    def test_layers(self):
        variables = init(self.LAYER, self.X)
        plain = nn.MultiHeadDotProductAttention(2, attention_fn=self._attention)

        def loss(params):
            given = {**variables, "params": params}
            return (self.LAYER.apply(given, self.X, mutable=["cache"])[0] ** 2).sum()

        found = jax.jit(jax.grad(loss))(variables["params"])
        wanted = jax.jit(
            jax.grad(lambda p: (plain.apply({"params": p}, self.X) ** 2).sum())
        )(variables["params"])
        assert found["key"]["kernel"].any() and found["value"]["kernel"].any()
        for got, one in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
            np.testing.assert_allclose(got, one, rtol=1e-3, atol=1e-4)

    @pytest.mark.slow
    def test_several_calls(self):
        variables = init(self.LAYER, self.X)

        def loss(params, between):
            cache, total = variables["cache"], 0.0
            for x in (self.X[:, :4], self.X[:, 4:]):
                given = {"params": params, "cache": between(cache)}
                out, changed = self.LAYER.apply(given, x, mutable=["cache"])
                cache, total = changed["cache"], total + (out**2).sum()
            return total

        params = variables["params"]
        with pytest.raises(TypeError, match=LOST):
            jax.grad(loss)(params, lambda cache: cache)
        found = jax.grad(loss)(params, jax.lax.stop_gradient)
        assert found["key"]["kernel"].any() and found["value"]["kernel"].any()
