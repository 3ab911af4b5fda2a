"""Caches of few bits: packed, rotated, and with scales for groups of channels."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite import config, kv_cache, numerics
from aqtlite.kv_cache import packed
from aqtlite.quantization.quantize import quantize
from tests.common import assert_same, normal, relative_error

pytestmark = pytest.mark.code("quick")

LENGTH, HEADS, DEPTH = 32, 2, 64
CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))


def with_bits(bits, rotation=None, blocks=None, of=config.qat(8)):  # noqa: B008
    return config.update(
        of,
        {
            "fwd.rhs.numerics": numerics.IntSymmetric(bits=bits),
            "fwd.rotation": rotation,
            "fwd.rhs.blocks": blocks,
        },
    )


@pytest.mark.parametrize(("bits", "depth"), [(2, 8), (3, 13), (3, 8), (4, 13)])
def test_integers_are_packed_and_unpacked(bits, depth):
    x = normal((2, 5, 3, depth), bits)
    q = quantize(x, with_bits(bits).fwd.rhs, 3)
    held = jax.jit(packed.pack)(q)
    sizes = {(2, 8): 2, (3, 13): 6, (3, 8): 3, (4, 13): 7}
    assert held.shape == x.shape and held.packed.shape == (2, 3, sizes[bits, depth], 5)
    got = jax.jit(packed.as_qtensor)(held).unpacked()
    assert got.qvalue.dtype == jnp.int8
    assert_same(got.dequant(), q.dequant())


def test_bytes_of_a_position():
    """Beside those of its scale."""

    def size(bits):
        cfg = kv_cache.config_for(bits)
        made = jax.eval_shape(lambda: kv_cache.empty((2, 128, 4, 64), jnp.float32, cfg))
        arrays = jax.tree.leaves((made.key, made.value))
        return sum(x.size * x.dtype.itemsize for x in arrays)

    positions = 2 * 2 * 128 * 4
    sizes = {bits: size(bits) // positions - 4 for bits in (8, 4, 3, 2)}
    assert sizes == {8: 64, 4: 32, 3: 24, 2: 16}


@functools.cache
def outliers():
    """Queries, keys and values; two channels of keys and values are ten times large."""
    large = np.ones((HEADS, DEPTH), np.float32)
    large[0, [3, 40]] = large[1, [17, 18]] = 10
    query, key, value = (normal((LENGTH, HEADS, DEPTH), seed) for seed in range(3))
    return query, key * large, value * large


def error(cfg):
    attend = jax.jit(kv_cache.attend_uncached, static_argnums=3)
    got = attend(*outliers(), cfg, CAUSAL)
    return relative_error(got, nn.dot_product_attention(*outliers(), mask=CAUSAL))


def test_rotations_and_groups_spread_outliers():
    plain, rotated = error(with_bits(4)), error(kv_cache.config_for(4))
    assert 0.3 < plain < 0.6
    assert rotated < min(0.182, plain / 2.5)
    groups = config.Blocks(size=16)
    assert error(with_bits(4, blocks=groups)) < 0.9 * plain
    assert error(with_bits(4, config.Hadamard(size=16), groups)) < 0.9 * plain
    assert error(kv_cache.config_for(3)) < 0.4 < error(with_bits(3))


def test_scores_are_rotated_and_values_rotated_back():
    """To what they were, up to rounding, in 16 bits of the grid."""
    assert error(with_bits(15, config.Hadamard())) < 0.02
    floats = with_bits(15, config.Hadamard(), of=config.weight_only(8))
    assert error(floats) < 1e-3


ODD = {
    "packed": (with_bits(3), 5, 7),
    "rotated": (kv_cache.config_for(4), 12, 7),
    "groups": (with_bits(4, config.Hadamard(size=4), config.Blocks(count=2)), 12, 4),
    "weight_only": (
        with_bits(4, config.Hadamard(), of=config.weight_only(8)),
        8,
        3,
    ),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("packed", "float32"),
        ("rotated", "bfloat16"),
        ("groups", "float16"),
        ("weight_only", "float32"),
    ],
)
def test_a_cache_attends_as_attention_without_one(name, dtype):
    """With heads of any size, 4 of queries for 2 of keys, and no batch axes."""
    cfg, depth, value_depth = ODD[name]
    query = normal((6, 4, depth)).astype(dtype)
    key = normal((6, 2, depth), 1).astype(dtype)
    value = normal((6, 2, value_depth), 2).astype(dtype)

    @jax.jit
    def both(query, key, value):
        cache = kv_cache.empty((6, 2, depth), dtype, cfg, value_depth)
        cache = kv_cache.append(cache, key, value, cfg)
        mask = np.tril(np.ones((6, 6), bool))
        return (
            kv_cache.attend(query, cache, cfg),
            kv_cache.attend_uncached(query, key, value, cfg, mask),
        )

    got, wanted = both(query, key, value)
    assert got.dtype == dtype and got.shape == (6, 4, value_depth)
    np.testing.assert_array_equal(got.astype("float32"), wanted.astype("float32"))


def test_gradients_are_those_of_attention_without_a_cache():
    cfg = with_bits(4, config.Hadamard(), config.Blocks(size=32))

    def cached(query, key, value):
        cache = kv_cache.empty(key.shape, key.dtype, cfg)
        cache = kv_cache.append(cache, key, value, cfg)
        return (kv_cache.attend(query, cache, cfg) ** 2).sum()

    def uncached(query, key, value):
        return (kv_cache.attend_uncached(query, key, value, cfg, CAUSAL) ** 2).sum()

    found, wanted = (
        jax.jit(jax.grad(loss, (0, 1, 2)))(*outliers()) for loss in (cached, uncached)
    )
    for got, one in zip(found, wanted, strict=True):
        assert np.abs(one).max() > 0.1
        np.testing.assert_allclose(got, one, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("cfg", "match"),
    [
        (
            with_bits(4, config.Hadamard(size=16)),
            "size=16 does not divide the 8 channels",
        ),
        (with_bits(4, blocks=config.Blocks(size=3)), "size=3 does not divide an axis"),
    ],
)
def test_sizes_that_do_not_divide_a_head(cfg, match):
    with pytest.raises(ValueError, match=match):
        kv_cache.empty((4, 2, 8), jnp.float32, cfg)
