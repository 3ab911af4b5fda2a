"""What attention to a quantized cache takes, and refuses."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite import config, kv_cache
from aqtlite.flax import nnx as aqtlite_nnx
from tests.common import normal

pytestmark = pytest.mark.code("quick")

INT8 = kv_cache.config_for(8)
BLOCKS = config.update(INT8, {"fwd.rhs.blocks": config.Blocks(count=2)})
QUERY, KEY, VALUE = (normal((2, 3, heads, 8), i) for i, heads in enumerate((4, 2, 2)))
CAUSAL = jnp.tril(jnp.ones((3, 3), bool))


def written(cfg=INT8, length=3):
    cache = kv_cache.empty((2, length, 2, 8), "float32", cfg)
    return kv_cache.append(cache, KEY, VALUE, cfg)


def attend(mask=None, query=QUERY, cfg=INT8):
    return kv_cache.attend(query, written(), cfg, mask)


def uncached(mask=None, query=QUERY, key=KEY, value=VALUE, cfg=INT8):
    return kv_cache.attend_uncached(query, key, value, cfg, mask)


def of_nnx(mask=None):
    return aqtlite_nnx.QuantizedCache(INT8)(QUERY, KEY, VALUE, mask, is_causal=True)


each = pytest.mark.parametrize("call", [attend, uncached, of_nnx])


@each
@pytest.mark.parametrize("dtype", ["bool", "int32", "float32"])
def test_masks_of_any_dtype(call, dtype):
    """Flax makes masks of float32."""
    mask = CAUSAL.at[2, 1].set(False)
    np.testing.assert_allclose(call(mask.astype(dtype)), uncached(mask), atol=1e-6)
    np.testing.assert_array_equal(
        jax.jit(call)(mask.astype(dtype)), jax.jit(call)(mask)
    )


@each
def test_masks_that_are_added(call):
    """They would attend to what they mask."""
    added = jnp.where(CAUSAL, 0, -1e9)
    with pytest.raises(ValueError, match="numbers other than 1.* give mask == 0"):
        call(added)
    assert jnp.isnan(jax.jit(call)(added)).any((0, 2, 3))[:2].all()
    np.testing.assert_allclose(call(added == 0), uncached(CAUSAL), atol=1e-6)


@each
@pytest.mark.parametrize(
    "shape", [(5, 1, 3, 3), (1, 1, 1, 3, 3), (2, 3, 3, 3), (2, 3), (4,)]
)
def test_masks_of_other_shapes(call, shape):
    with pytest.raises(ValueError, match="does not broadcast to"):
        call(jnp.ones(shape, bool))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda: attend(query=normal((2, 3, 4, 16))), ValueError, "does not fit keys"),
        (lambda: attend(cfg=BLOCKS), ValueError, "does not fit keys of .* 2 groups"),
        (
            lambda: kv_cache.attend(QUERY, written(BLOCKS), INT8),
            ValueError,
            "does not fit keys",
        ),
        (
            lambda: kv_cache.attend(QUERY, kv_cache.truncate(written(), [3, 2]), INT8),
            ValueError,
            "3 queries attend to a KV cache of which",
        ),
        (lambda: uncached(query=normal((2, 3, 4, 16))), ValueError, "does not fit"),
        (lambda: uncached(value=normal((2, 3, 4, 8))), ValueError, "differ in another"),
        (lambda: uncached(value=normal((6, 3, 2, 8))), ValueError, "differ in another"),
        (lambda: uncached(value=normal((2, 2, 2, 8))), ValueError, "differ in another"),
        (lambda: uncached(key=KEY.astype(int)), TypeError, "key must be float32"),
        (lambda: uncached(value=VALUE.astype(int)), TypeError, "value must be float32"),
        (
            lambda: kv_cache.empty((2, 3, 2, 8), "int8", INT8),
            TypeError,
            "dtype=int8 of a KV cache: it is that of keys and values before",
        ),
        (
            lambda: kv_cache.empty((2, 3, 2, 8), "float32", INT8, window=2.0),
            TypeError,
            "window of a KV cache must be an int, got 2.0",
        ),
        (lambda: kv_cache.grow(written(), 8.0), TypeError, "length .* must be an int"),
    ],
)
def test_what_does_not_fit(change, error, match):
    with pytest.raises(error, match=match):
        change()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_rotation_is_that_of_the_cache(bits):
    plain = config.update(kv_cache.config_for(bits), {"fwd.rotation": None})
    changes = [config.Hadamard(**fields) for fields in ({}, {"size": 4}, {"seed": 1})]
    rotated, *others = (config.update(plain, {"fwd.rotation": one}) for one in changes)
    pairs = [(plain, rotated), *((rotated, other) for other in (plain, *others))]
    for one, other in pairs:
        what = f"keys with the rotation {re.escape(str(one.fwd.rotation))}"
        cache = written(one)
        kv_cache.attend(QUERY, cache, one)
        with pytest.raises(ValueError, match=f"{what}, and fwd.rotation of"):
            kv_cache.attend(QUERY, cache, other)
        with pytest.raises(ValueError, match=f"{what}, and fwd.rotation of"):
            kv_cache.append(cache, KEY, VALUE, other)
        with pytest.raises(ValueError, match="do not fit"):
            kv_cache.concatenate([cache, written(other)])


@pytest.mark.parametrize("call", [written, uncached, kv_cache.check_config])
@pytest.mark.parametrize(
    ("cfg", "match"),
    [
        (config.block_fp8(), r"fwd\.rhs\.blocks=.* at each position"),
        (config.lsq(8), r"fwd\.lhs\.calibration=LSQ\(.* does not keep"),
        (config.unquantized(), r"fwd\.rhs is what keys and values are"),
        (config.gptq(4, 8), r"fwd\.rhs\.rounding=Gptq\(.* leave it None"),
        (
            config.update(BLOCKS, {"fwd.rhs.double_scales": config.DoubleScales()}),
            r"fwd\.rhs\.double_scales=.* leave it None",
        ),
        (
            config.update(INT8, {"fwd.rhs.sparsity": config.NofM(2, 4)}),
            r"fwd\.rhs\.sparsity=.* leave it None",
        ),
        (
            config.update(BLOCKS, {"fwd.rhs.scale_dtype": "float16"}),
            r"fwd\.rhs\.scale_dtype='float16' rounds scales relative to the largest",
        ),
    ],
)
def test_configs_that_a_cache_does_not_follow(call, cfg, match):
    """Training with `attend_uncached` refuses what decoding would."""
    with pytest.raises(ValueError, match=match):
        call(cfg=cfg)


def test_groups_of_channels():
    found = kv_cache.attend(QUERY, written(BLOCKS), BLOCKS)
    np.testing.assert_array_equal(found, uncached(CAUSAL, cfg=BLOCKS))


def test_arguments_that_nnx_gives():
    call = functools.partial(aqtlite_nnx.QuantizedCache(INT8), QUERY, KEY, VALUE)
    found = call(bias=None, dtype=None, precision=None)
    np.testing.assert_array_equal(found, call())
    with pytest.raises(ValueError, match="bias= was given"):
        call(bias=jnp.zeros((3, 3)))
    with pytest.raises(TypeError, match="no argument 'maks'"):
        call(maks=CAUSAL)
