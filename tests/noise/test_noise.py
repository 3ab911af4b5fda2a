"""Statistics of stochastic rounding.

Under the null hypothesis every z below is standard normal. Data and keys are fixed, so
that a test either always passes or always fails.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import config, noise
from tests.common import MATMUL, normal, tensor

# Compares with thresholds of statistics, and noise with noise of the same program.
pytestmark = pytest.mark.code("quick")

NOISY = {"preserve_max_val": True, "stochastic_rounding": True}
X = normal((8, 32))
KEYS = 4000


def noisy(bits=8, **fields):
    return tensor(bits, grid=NOISY, **fields)


@functools.cache
def stored_over_keys(bits, count=KEYS):
    """Stored integers of X for consecutive integer keys: (keys, elements)."""

    @jax.jit
    @jax.vmap
    def rounded(seed):
        return aqtlite.quantize(X, noisy(bits), 1, jax.random.key(seed)).qvalue

    return np.asarray(rounded(jnp.arange(count)), np.float64).reshape(count, -1)


@functools.cache
def exact_position(bits):
    """Where the elements of X lie between stored integers."""
    scale = np.asarray(aqtlite.quantize(X, noisy(bits), 1).scale, np.float64)
    return (np.asarray(X, np.float64) / scale).ravel()


def standardized(bits):
    """Rounding errors over keys, of the elements that are not almost on the grid."""
    step = 2 if bits == 1 else 1
    position = exact_position(bits) / step + (0.5 if bits == 1 else 0)
    p = position - np.floor(position)
    errors = (stored_over_keys(bits) - exact_position(bits)) / step
    is_random = KEYS * p * (1 - p) > 20
    return errors[:, is_random] / np.sqrt(p * (1 - p))[is_random], is_random


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_unbiased_for_every_element(bits):
    errors, is_random = standardized(bits)
    assert errors.shape[1] > 150
    z = errors.mean(axis=0) * np.sqrt(KEYS)
    assert np.abs(z).max() < 5
    assert 0.85 < np.sqrt(np.mean(z**2)) < 1.15
    # Variances are those of an unbiased choice between two neighbours.
    np.testing.assert_allclose(np.mean(errors**2), 1, rtol=0.02)
    # The others, the largest of each channel among them, hardly ever move.
    near = stored_over_keys(bits)[:, ~is_random] - exact_position(bits)[~is_random]
    assert np.abs(near.mean(axis=0)).max() < 0.03


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_the_largest_element_of_a_channel_is_exact(bits):
    largest = np.argmax(np.abs(np.asarray(X)), axis=1)
    stored = stored_over_keys(bits).reshape(KEYS, *X.shape)
    at_largest = np.abs(stored[:, np.arange(len(X)), largest])
    grid = noisy(bits).numerics
    np.testing.assert_array_equal(at_largest, grid.bound / grid.unit)


def assert_normal(z, limit):
    assert np.abs(z).max() < limit
    four_standard_errors = 4 / np.sqrt(2 * z.size)
    assert abs(np.sqrt(np.mean(z**2)) - 1) < max(0.1, four_standard_errors)


@pytest.mark.parametrize("bits", [8, 1])
def test_elements_are_independent(bits):
    errors, _ = standardized(bits)
    correlation = np.corrcoef(errors.T)
    z = correlation[np.triu_indices_from(correlation, 1)] * np.sqrt(KEYS)
    assert_normal(z, 5.5)


@pytest.mark.parametrize("lag", [1, 2, 256])
def test_consecutive_keys_are_independent(lag):
    errors, _ = standardized(8)
    z = (errors[lag:] * errors[:-lag]).sum(axis=0) / np.sqrt(KEYS - lag)
    assert_normal(z, 5)
    total = (errors[lag:] * errors[:-lag]).sum() / np.sqrt(errors[lag:].size)
    assert abs(total) < 5


def test_neighbouring_keys_and_elements_are_independent():
    """No key's noise is that of another one, shifted by a few elements."""
    errors, is_random = standardized(8)
    full = np.zeros((KEYS, X.size))
    full[:, is_random] = errors
    for shift in (1, 2, 32):
        product = full[1:, shift:] * full[:-1, :-shift]
        assert abs(product.sum()) / np.sqrt(np.count_nonzero(product)) < 5


# Gradients of an identity matrix show the rounded cotangent itself. Both gradient
# operands are the same numbers here, on the same grid.
EYE = jnp.eye(16)
GRADIENT = normal((16, 16), 5)
PER_TENSOR = config.DotGeneralRaw(lhs=noisy(4, calib_shared_axes="per_tensor"))
NOISY_BACKWARD = aqtlite.make_dot_general(
    config.DotGeneral(dlhs=PER_TENSOR, drhs=PER_TENSOR)
)


def rounded_gradients(key, lhs=EYE, rhs=EYE):
    _, vjp = jax.vjp(lambda x, w: NOISY_BACKWARD(x, w, MATMUL, key=key), lhs, rhs)
    return vjp(GRADIENT)


def correlation_z(one, other):
    one, other = (
        np.asarray(x, np.float64) - np.asarray(GRADIENT) for x in (one, other)
    )
    return float((one * other).sum() / np.sqrt((one**2).sum() * (other**2).mean()))


def test_both_gradients_have_independent_noise():
    keys = jax.random.split(jax.random.key(0), 500)
    dlhs, drhs = jax.jit(jax.vmap(rounded_gradients))(keys)
    assert correlation_z(dlhs, dlhs) > 100
    assert abs(correlation_z(dlhs, drhs)) < 5


def test_both_gradients_have_independent_noise_without_a_key():
    dlhs, drhs = jax.jit(lambda: rounded_gradients(None))()
    assert np.mean(np.asarray(dlhs) != np.asarray(drhs)) > 0.2


def test_layers_have_independent_noise_without_a_key():
    """Two layers with one input, whose outputs are added, see the same gradient."""
    dot = aqtlite.make_dot_general(config.fully_quantized(bwd_bits=4))
    x, w1, w2 = normal((32, 16)), normal((16, 32), 1), normal((16, 32), 2)

    def loss(w1, w2):
        return jnp.sum(jnp.sin(dot(x, w1, MATMUL) + dot(x, w2, MATMUL)))

    one, other = jax.jit(jax.grad(loss, (0, 1)))(w1, w2)
    assert np.mean(np.asarray(one) != np.asarray(other)) > 0.2


def test_gradient_of_the_preset_is_unbiased():
    """`fully_quantized()`, integers reused: the mean over keys is the exact one."""
    x, w, g = normal((8, 16)), normal((16, 24), 1), normal((8, 24), 2)

    def gradients(cfg, key):
        dot = aqtlite.make_dot_general(cfg)
        return jax.vjp(lambda x, w: dot(x, w, MATMUL, key=key), x, w)[1](g)

    keys = jax.random.split(jax.random.key(1), KEYS)
    noisy_ones = jax.jit(jax.vmap(lambda k: gradients(config.fully_quantized(), k)))
    exact = jax.jit(lambda: gradients(config.fully_quantized(bwd_bits=None), None))()
    for sample, wanted in zip(noisy_ones(keys), exact, strict=True):
        sample = np.asarray(sample, np.float64)
        error = sample.mean(axis=0) - np.asarray(wanted, np.float64)
        z = error / (sample.std(axis=0) / np.sqrt(KEYS))
        assert_normal(z, 5)


def test_without_a_key_the_result_is_reproducible_and_follows_the_tensor():
    first, again = aqtlite.quantize(X, noisy(), 1), aqtlite.quantize(X, noisy(), 1)
    np.testing.assert_array_equal(first.qvalue, again.qvalue)
    # The same values times 1 + 2^-20, on the same grid with another seed.
    moved = aqtlite.quantize(X * (1 + 2.0**-20), noisy(), 1)
    share = np.mean(np.asarray(first.qvalue) != np.asarray(moved.qvalue))
    assert share > 0.2


def test_without_a_key_the_noise_follows_the_tensor_under_a_fixed_scale():
    """A power-of-two scale stays while the values move; the noise must not."""
    cfg = noisy(calib_shared_axes="per_tensor", po2_scale=True)
    first = aqtlite.quantize(X, cfg, 1)
    moved = aqtlite.quantize(X * (1 + 2.0**-20), cfg, 1)
    np.testing.assert_array_equal(first.scale, moved.scale)
    assert np.mean(np.asarray(first.qvalue) != np.asarray(moved.qvalue)) > 0.2


def test_typed_and_raw_keys():
    typed = aqtlite.quantize(X, noisy(), 1, jax.random.key(3))
    raw = aqtlite.quantize(X, noisy(), 1, jax.random.PRNGKey(3))
    other = aqtlite.quantize(X, noisy(), 1, jax.random.key(4))
    rbg = aqtlite.quantize(X, noisy(), 1, jax.random.key(3, impl="rbg"))
    np.testing.assert_array_equal(typed.qvalue, raw.qvalue)
    for different in (other, rbg):
        assert np.any(np.asarray(typed.qvalue) != np.asarray(different.qvalue))


@pytest.mark.parametrize(
    ("key", "match"),
    [
        (3, "must be a jax.random key, got int"),
        (np.zeros(2, np.float32), "got float32 of shape"),
        (np.zeros((2, 2), np.uint32), r"got uint32 of shape \(2, 2\)"),
        (jax.random.split(jax.random.key(0)), r"got keys of shape \(2,\)"),
    ],
)
def test_refuses_what_is_not_a_key(key, match):
    with pytest.raises(TypeError, match=match):
        aqtlite.quantize(X, noisy(), 1, key)
    dot = aqtlite.make_dot_general(config.fully_quantized())
    with pytest.raises(TypeError, match=match):
        dot(X, X.T, MATMUL, key=key)


def test_random_bits_are_uniform():
    seed = noise.seed_from_key(jax.random.key(0))
    bits = np.asarray(noise.random_bits((1 << 16,), seed))
    set_bits = ((bits[:, None] >> np.arange(32)) & 1).mean(axis=0)
    assert np.abs((set_bits - 0.5) * 2 * np.sqrt(bits.size)).max() < 5
    counts = np.bincount(bits >> 24, minlength=256)
    chi2 = ((counts - 256) ** 2 / 256).sum()
    assert abs(chi2 - 255) < 5 * np.sqrt(2 * 255)


def test_fold_in_gives_other_seeds():
    seed = noise.seed_from_key(jax.random.key(0))
    folded = {tuple(np.asarray(noise.fold_in(seed, salt))) for salt in range(5)}
    assert len(folded | {tuple(np.asarray(seed))}) == 6


def test_seeds_of_channels():
    """Every bit of a bound, and every further scale, gives another seed."""
    bound = np.arange(1.0, 9.0, dtype=np.float32).reshape(8, 1)
    variants = [bound]
    for bit in (0, 12, 30):
        variants.append((bound.view(np.uint32) ^ np.uint32(1 << bit)).view(np.float32))
    others = [(), (bound,), (2 * bound,), (bound, bound), (np.float32([[2.5]]),)]
    seeds = [noise.seed_from_bounds(x, *more) for x in variants for more in others]
    words = np.stack([np.asarray(seed) for seed in seeds])
    assert words.shape == (20, 2, 8, 1)
    assert len({tuple(pair) for pair in words.swapaxes(1, 2).reshape(-1, 2)}) == 160


def test_channels_have_independent_noise_without_a_key():
    """Rows that are equal but for their scale are rounded in other places."""
    row = np.random.default_rng(0).uniform(0.5, 1, 4096).astype(np.float32)
    x = jnp.asarray(np.stack([row * 2**-i for i in range(8)]))
    up = np.asarray(aqtlite.quantize(x, noisy(), 1).qvalue, np.float64)
    up -= up.mean(0)
    correlation = np.corrcoef(up)[np.triu_indices(8, 1)]
    assert np.abs(correlation + 1 / 7).max() < 5 / np.sqrt(4096)


def test_seeds_read_no_element_twice():
    """The noise costs no reduction beside the one of calibration."""
    lowered = jax.jit(lambda x: aqtlite.quantize(x, noisy(), 1).qvalue).lower(X)
    plain = jax.jit(lambda x: aqtlite.quantize(x, tensor(8), 1).qvalue).lower(X)

    def reductions(program):
        return program.as_text().count("applies stablehlo.maximum across")

    assert reductions(lowered) == reductions(plain) > 0
