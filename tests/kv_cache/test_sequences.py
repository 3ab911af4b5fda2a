"""Sequences of their own lengths, windows, and rows that come and go."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization

from aqtlite import config, kv_cache
from aqtlite.flax import map_caches
from tests.common import assert_same, normal

pytestmark = pytest.mark.code("quick")

CFG = kv_cache.config_for(4)
LENGTH, HEADS, DEPTH = 9, 2, 8
QUERY, KEY, VALUE = (normal((3, LENGTH, HEADS, DEPTH), seed) for seed in range(3))


@functools.partial(jax.jit, static_argnames="cfg")
def step(cache, query, key, value, cfg=CFG):
    cache = kv_cache.append(cache, key, value, cfg)
    return cache, kv_cache.attend(query, cache, cfg)


@functools.cache
def empty(batch=3, length=LENGTH, window=None, cfg=CFG):
    shape = (batch, length, HEADS, DEPTH)
    return kv_cache.empty(shape, jnp.float32, cfg, window=window)


def piece(start, count, rows=slice(None)):
    return [x[rows, start : start + count] for x in (QUERY, KEY, VALUE)]


@functools.cache
def whole(window=LENGTH, cfg=CFG):
    """Attention of the whole sequences."""
    far = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    mask = (far >= 0) & (far < window)
    attend = jax.jit(kv_cache.attend_uncached, static_argnums=3)
    return np.asarray(attend(QUERY, KEY, VALUE, cfg, mask))


def assert_attends(out, wanted):
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6)


def written(count=5, **fields):
    """A cache of the first positions of all sequences."""
    return step(empty(**fields), *piece(0, count))[0]


def next_of(cache, count=1):
    """The next positions of each sequence, and attention of the whole one there."""
    rows = np.arange(3)[:, None]
    at = np.broadcast_to(np.asarray(cache.index), 3)[:, None] + np.arange(count)
    return [x[rows, at] for x in (QUERY, KEY, VALUE)], (rows, at)


class TestLengths:
    def test_prompts_padded_at_their_ends(self):
        """Whatever is in the padding, NaN included."""
        lengths = np.array([2, 0, 5])
        query, key, value = piece(0, 5)
        is_padding = np.arange(5) >= lengths[:, None]
        key, value = (
            jnp.where(is_padding[..., None, None], jnp.nan, x) for x in (key, value)
        )
        cache, out = step(empty(), query, key, value)
        for row, length in enumerate(lengths):
            assert_attends(out[row, :length], whole()[row, :length])
        cache = kv_cache.truncate(cache, lengths)
        assert cache.index.tolist() == lengths.tolist()
        for _ in range(2):
            taken, at = next_of(cache)
            cache, out = step(cache, *taken)
            assert_attends(out, whole()[at])

    def test_several_positions_at_once(self):
        cache = kv_cache.truncate(written(), [1, 4, 2])
        taken, at = next_of(cache, 3)
        assert_attends(step(cache, *taken)[1], whole()[at])

    def test_a_full_sequence_spoils_itself_alone(self):
        cache = kv_cache.truncate(written(LENGTH), [LENGTH, 2, 3])
        with pytest.raises(ValueError, match="room for 9 positions, .* 1 more"):
            kv_cache.append(cache, *piece(4, 1)[1:], CFG)
        _, out = step(cache, *piece(4, 1))
        assert np.isnan(out).all((1, 2, 3)).tolist() == [True, False, False]
        assert np.isfinite(out[1:]).all()

    def test_a_nan_spoils_what_attends_to_it_alone(self):
        query, key, value = piece(0, 5)
        _, out = step(empty(), query, key.at[1, 1, 0, 0].set(jnp.nan), value)
        assert np.isnan(out[1, 1:, 0]).all()
        assert_attends(out[1, 0], whole()[1, 0])
        assert_attends(out[1, :, 1], whole()[1, :5, 1])
        assert_attends(out[::2], whole()[::2, :5])

    @pytest.mark.slow
    def test_under_vmap_and_scan(self):
        """Each sequence mapped on its own, with a length of its own."""
        cache = kv_cache.truncate(written(), [1, 4, 2])
        axes = dataclasses.replace(cache, key=0, value=0, index=0)
        taken, at = next_of(cache, 3)

        @functools.partial(jax.vmap, in_axes=(axes, 0))
        def run(cache, taken):
            return jax.lax.scan(
                lambda cache, one: step(cache, *(x[None] for x in one)), cache, taken
            )[1][:, 0]

        assert_attends(jax.jit(run)(cache, taken), whole()[at])


class TestWindow:
    @pytest.mark.parametrize(
        ("cfg", "is_of_each"),
        [(CFG, True), (config.qat(8), False)],
        ids=["int4", "int8"],
    )
    def test_a_ring(self, cfg, is_of_each):
        cache, start = empty(length=5, window=3, cfg=cfg), 0
        if is_of_each:
            cache = kv_cache.truncate(cache, 0)
        for count in (3, 3, 1, 1, 1):
            cache, out = step(cache, *piece(start, count), cfg=cfg)
            assert_attends(out, whole(3, cfg)[:, start : start + count])
            start += count
        wanted = [5, 6, 7, 8, 4]
        assert (kv_cache.positions(cache) == np.array(wanted)).all()

    @staticmethod
    def six():
        cache = kv_cache.truncate(empty(length=5, window=3), 0)
        for start in (0, 3):
            cache, _ = step(cache, *piece(start, 3))
        return cache

    def test_positions_taken_back(self):
        cache = kv_cache.truncate(self.six(), [6, 5, 4])
        taken, at = next_of(cache)
        cache, out = step(cache, *taken)
        assert_attends(out, whole(3)[at])
        with pytest.raises(ValueError, match="has lost those before position 1"):
            kv_cache.truncate(cache, 1)
        lost = jax.jit(kv_cache.truncate)(cache, jnp.array([1, 1, 3]))
        taken, (rows, at) = next_of(lost)
        out = step(lost, *taken)[1]
        assert np.isnan(out[:2]).all()
        assert_attends(out[2:], whole(3)[rows[2:], at[2:]])

    @pytest.mark.parametrize("seed", range(4))
    def test_what_was_lost_stays_so(self, seed):
        """Whatever is cut off and added: right, or NaN where a position is lost."""
        random, cut = np.random.default_rng(seed), jax.jit(kv_cache.truncate)
        cache = kv_cache.truncate(empty(length=4, window=3), 0)
        position, held, lost = 0, set(), 0
        for _ in range(40):
            if position == LENGTH or (position and random.random() < 0.4):
                position = int(random.integers(position))
                cache = cut(cache, position)
                held = {one for one in held if one < position}
            elif cache.length < 7 and random.random() < 0.1:
                cache = kv_cache.grow(cache, cache.length + 1)
            cache, out = step(cache, *piece(position, 1))
            held -= set(range(position, -1, -cache.length))
            held.add(position)
            if held.issuperset(range(max(position - 2, 0), position)):
                assert_attends(out, whole(3)[:, position : position + 1])
            else:
                assert np.isnan(out).all()
                lost += 1
            position += 1
        assert lost

    def test_a_ring_that_grows(self):
        cache = kv_cache.grow(kv_cache.truncate(self.six(), [6, 5, 4]), 8)
        taken, at = next_of(cache)
        assert_attends(step(cache, *taken)[1], whole(3)[at])


class TestRows:
    def test_they_are_taken_joined_and_put_in(self):
        first, second, third = (step(empty(1), *piece(0, 5, [i]))[0] for i in range(3))
        both = kv_cache.concatenate([second, kv_cache.truncate(second, 2), third])
        assert both.index.tolist() == [5, 2, 5]
        assert_same(kv_cache.take(both, [2, 2]), kv_cache.take(third, [0, 0]))
        # Row 0 makes room for another sequence.
        after = jax.jit(kv_cache.insert)(both, 0, first)
        taken, at = next_of(after)
        assert_attends(step(after, *taken)[1], whole()[at])
        # Of a shorter cache.
        after = kv_cache.insert(both, 1, empty(1, 4))
        assert after.index.tolist() == [5, 0, 5] and after.length == LENGTH

    def test_growing_keeps_what_was_written(self):
        cache = kv_cache.grow(kv_cache.truncate(written(), [2, 4, 5]), 12)
        taken, at = next_of(cache)
        assert_attends(step(cache, *taken)[1], whole()[at])


def stack(*caches):
    """As layers of `nn.scan` have them."""
    return jax.tree.map(lambda *xs: jnp.stack(xs), *caches)


CHANGES = {
    "truncate": lambda cfg, c: kv_cache.truncate(c, jnp.array([3, 1, 2])),
    "take": lambda cfg, c: kv_cache.take(c, [2, 0]),
    "insert": lambda cfg, c: kv_cache.insert(c, 1, empty(1, cfg=cfg)),
    "grow": lambda cfg, c: kv_cache.grow(c, LENGTH + 2),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("bits", [8, 4])
def test_layers_that_are_stacked(name, bits):
    cfg = kv_cache.config_for(bits)
    change = functools.partial(CHANGES[name], cfg)

    def layer(i):
        x = [i + one[:, :4] for one in (KEY, VALUE)]
        return kv_cache.append(empty(cfg=cfg), *x, cfg)

    layers = [layer(i) for i in range(2)]
    names = "cached_key", "cached_value", "cache_index"
    stacked = stack(*layers)
    collection = dict(
        zip(names, (stacked.key, stacked.value, stacked.index), strict=True)
    )
    changed = map_caches(change, {"layers": collection}, stacked=1)["layers"]
    after = stack(*(change(one) for one in layers))
    wanted = after.key, after.value, after.index
    assert_same([changed[name] for name in names], list(wanted))


class TestBadInput:
    CACHE = empty(2, 4)

    @pytest.mark.parametrize(
        ("change", "error", "match"),
        [
            (lambda c: kv_cache.truncate(c, -1), ValueError, "not to be negative"),
            (lambda c: kv_cache.truncate(c, 1.0), TypeError, "must be integers"),
            (lambda c: kv_cache.truncate(c, [1, 2, 3]), ValueError, "broadcast"),
            (lambda c: kv_cache.take(c, [2]), IndexError, r"rows \[2\] of .* 2"),
            (lambda c: kv_cache.take(c, 1), ValueError, "rows must be of 1 axis"),
            (lambda c: kv_cache.take(c, [[0]]), ValueError, "rows must be of 1 axis"),
            (lambda c: kv_cache.take(c, [1.0]), TypeError, "rows must be of integers"),
            (lambda c: kv_cache.insert(c, 1.7, c), TypeError, "row must be of integer"),
            (lambda c: kv_cache.insert(c, [0], c), ValueError, "row must be a scalar"),
            # Of what is no array at all, no elements.
            (lambda c: kv_cache.truncate(c, c), TypeError, "integers, got KVCache$"),
            (lambda c: kv_cache.take(c, c), TypeError, "integers, got KVCache$"),
            (lambda c: kv_cache.insert(c, c, 0), TypeError, "integers, got KVCache$"),
            (lambda c: kv_cache.insert(c, 0, 1), TypeError, "behind row, got 1$"),
            (
                lambda c: kv_cache.take(stack(c, c), [1, 0]),
                ValueError,
                r"index of shape \(2,\) .* layers that are stacked",
            ),
            (
                lambda c: kv_cache.truncate(stack(c, c), [1, 0]),
                ValueError,
                "layers that are stacked",
            ),
            (
                lambda c: kv_cache.concatenate([stack(c, c)]),
                ValueError,
                "layers that are stacked",
            ),
            (lambda c: kv_cache.insert(c, 1, c), IndexError, r"rows \[1 2\] of .* 2"),
            (lambda c: kv_cache.insert(c, 0, empty(1, 5)), ValueError, "do not fit"),
            (
                lambda c: kv_cache.insert(c, 0, empty(1, 4, cfg=config.qat(8))),
                ValueError,
                "bits=4.*bits=8",
            ),
            (
                lambda c: kv_cache.insert(
                    c, 0, kv_cache.empty((1, 4, 2, 8), "bfloat16", CFG)
                ),
                ValueError,
                "for float32 and bfloat16",
            ),
            (
                lambda c: kv_cache.grow(c, 3),
                ValueError,
                "4 or more, got 3: .*shrink",
            ),
            (lambda c: kv_cache.concatenate([]), ValueError, "at least one"),
            (lambda c: kv_cache.concatenate([c, empty()]), ValueError, "do not fit"),
            (
                lambda c: kv_cache.take(kv_cache.empty((4, 2, 8), "float32", CFG), [0]),
                ValueError,
                "no batch axis",
            ),
            (
                lambda c: empty(window=10),
                ValueError,
                "window .* from 1 to 9, got 10, and",
            ),
            (lambda c: empty(window=0), ValueError, "from 1 to 9, got 0"),
            (
                lambda c: step(empty(3, 4, window=3), *piece(0, 3)),
                ValueError,
                "3 positions at once.* window 3 has room for 2",
            ),
            (
                lambda c: step(
                    dataclasses.replace(c, index=jnp.zeros(3)), *piece(0, 1)
                ),
                ValueError,
                r"index of shape \(3,\)",
            ),
            (
                lambda c: kv_cache.attend(jnp.ones((2, 1, 2, 8), int), c, CFG),
                TypeError,
                "query must be floating",
            ),
            (
                lambda c: kv_cache.attend(jnp.ones((2, 8)), c, CFG),
                ValueError,
                "does not fit keys",
            ),
        ],
    )
    def test_errors(self, change, error, match):
        with pytest.raises(error, match=match):
            change(self.CACHE)


@pytest.mark.parametrize(
    ("batch", "length", "count"), [(0, 4, 1), (2, 0, 0), (2, 4, 0)]
)
@pytest.mark.parametrize("bits", [8, 4])
def test_no_sequences_or_positions(batch, length, count, bits):
    cfg = kv_cache.config_for(bits)
    cache = kv_cache.empty((batch, length, 2, 8), "float32", cfg)
    x = jnp.ones((batch, count, 2, 8))
    cache = kv_cache.append(cache, x, x, cfg)
    assert kv_cache.attend(x, cache, cfg).shape == x.shape


@pytest.mark.parametrize("window", [None, 4])
def test_a_step_traces_where_users_forbid_promotion(window):
    cache = kv_cache.empty((3, LENGTH, HEADS, DEPTH), jnp.bfloat16, CFG, window=window)
    cache = kv_cache.truncate(cache, [0, 0, 0])
    new = jax.ShapeDtypeStruct((3, 2, HEADS, DEPTH), jnp.bfloat16)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        _, out = jax.eval_shape(step, cache, new, new, new)
    assert out.dtype == jnp.bfloat16


@pytest.mark.parametrize("bits", [8, 4])
def test_flax_stores_caches(bits):
    cfg = kv_cache.config_for(bits)
    cache, _ = step(empty(cfg=cfg), *piece(0, 5), cfg=cfg)
    empty_one = jax.tree.map(jnp.zeros_like, cache)
    found = serialization.from_bytes(empty_one, serialization.to_bytes(cache))
    jax.tree.map(np.testing.assert_array_equal, found, cache)
