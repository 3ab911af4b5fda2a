"""Sources of noise, and noise that axes share.

Data and keys are fixed, so that a test either always passes or always fails.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import calibration, config, noise, numerics
from tests.common import MATMUL, normal, tensor
from tests.extensions import alternating

# Compares with thresholds of statistics, and noise with noise of the same program.
pytestmark = pytest.mark.code("quick")

NOISY = {"preserve_max_val": True, "stochastic_rounding": True}
GRIDS = {
    "int4": numerics.IntSymmetric(bits=4, **NOISY),
    "int1": numerics.IntSymmetric(bits=1, **NOISY),
    "uint8": numerics.IntAffine(bits=8, stochastic_rounding=True),
    "uint2": numerics.IntAffine(bits=2, stochastic_rounding=True),
    "int4_narrow": numerics.IntAffine(
        bits=4, signed=True, narrow_range=True, stochastic_rounding=True
    ),
    "fp6_e2m3": numerics.Float.from_dtype("float6_e2m3fn", stochastic_rounding=True),
    "nf4": numerics.NormalFloat(stochastic_rounding=True),
}
SOURCES = {"counter_hash": noise.CounterHash(), "jax_random": noise.JaxRandom()}
SHARED = {"none": None, "rows": (0,), "all": (0, 1)}
# Positions from 0.1 to 0.9 of a step on an integer grid, for which 2000 draws are many.
X = normal((4, 32)) + 0.3
KEYS = 2000


def noisy(grid, source=SOURCES["counter_hash"], shared=None, **fields):
    has_zero_point = grid.zero_point_range is not None
    how = calibration.MinMax() if has_zero_point else calibration.AbsMax()
    return config.Tensor(
        numerics=grid, calibration=how, noise=source, noise_shared_axes=shared, **fields
    )


@functools.cache
def rounded_over_keys(grid, source, shared):
    """The dequantized X for consecutive keys."""
    how = noisy(GRIDS[grid], SOURCES[source], SHARED[shared])

    @jax.jit
    @jax.vmap
    def rounded(seed):
        return aqtlite.quantize(X, how, 1, jax.random.key(seed)).dequant()

    return np.asarray(rounded(jnp.arange(KEYS)), np.float64)


CASES = [
    *((grid, "counter_hash", "none") for grid in GRIDS),
    ("int4", "counter_hash", "rows"),
    ("int4", "jax_random", "none"),
    ("uint8", "jax_random", "rows"),
    ("nf4", "counter_hash", "all"),
]


@pytest.mark.parametrize(("grid", "source", "shared"), CASES)
def test_unbiased_for_every_element(grid, source, shared):
    """Also for the largest and the smallest one of a channel."""
    got = rounded_over_keys(grid, source, shared)
    below, above = got.min(0), got.max(0)
    x = np.asarray(X, np.float64)
    assert ((below <= x + 1e-6) & (above >= x - 1e-6)).all()
    p = np.clip((x - below) / np.maximum(above - below, 1e-9), 0, 1)
    is_random = KEYS * p * (1 - p) > 20
    assert is_random.mean() > 0.6
    # Two values alone, the neighbours, and the mean between them.
    assert ((got == below) | (got == above)).all()
    z = (got.mean(0) - x) / ((above - below) * np.sqrt(p * (1 - p) / KEYS) + 1e-9)
    assert np.abs(z[is_random]).max() < 5
    near = np.abs(got.mean(0) - x)[~is_random]
    assert near.max(initial=0) < 0.03 * np.maximum(above - below, 0.1).max()


def correlations(got):
    """Of the errors of elements that are in neighbouring rows."""
    error = got - got.mean(0)
    scale = np.sqrt((error**2).mean(0)) + 1e-9
    return ((error[:, :-1] * error[:, 1:]).mean(0)) / (scale[:-1] * scale[1:])


def test_noise_is_shared_along_axes_alone():
    own = correlations(rounded_over_keys("int4", "counter_hash", "none"))
    rows = correlations(rounded_over_keys("int4", "counter_hash", "rows"))
    assert np.abs(own).max() < 5 / np.sqrt(KEYS)
    assert np.median(np.abs(rows)) > 0.3
    columns = correlations(
        rounded_over_keys("int4", "counter_hash", "rows").swapaxes(1, 2)
    )
    assert np.abs(columns).max() < 5 / np.sqrt(KEYS)


@pytest.mark.parametrize(
    ("source", "key"),
    [("counter_hash", None), ("jax_random", None), ("jax_random", jax.random.key(0))],
)
def test_equal_rows_are_rounded_alike_where_they_share_noise(source, key):
    """Without a key, too, where each row has a seed of its own."""
    row = np.random.default_rng(0).uniform(0.5, 1, 64).astype(np.float32)
    x = jnp.asarray(np.stack([row * 2**-i for i in range(6)]))

    def stored(shared):
        how = noisy(GRIDS["int4"], SOURCES[source], shared)
        return np.asarray(jax.jit(lambda x: aqtlite.quantize(x, how, 1, key).qvalue)(x))

    shared, own = stored((-2,)), stored(None)
    np.testing.assert_array_equal(shared, np.tile(shared[:1], (6, 1)))
    assert (own != own[:1]).any(1)[1:].all()


@pytest.mark.code("users")
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_bits_are_those_of_the_seed_in_every_program(source):
    seeds = jnp.arange(2 * 3, dtype=jnp.uint32).reshape(2, 3, 1) * jnp.uint32(77)
    bits = functools.partial(source.bits, (3, 8))
    wanted = jax.jit(bits)(seeds)
    assert wanted.shape == (3, 8) and wanted.dtype == jnp.uint32
    assert len(np.unique(wanted)) == 24
    mapped = jax.jit(jax.vmap(bits))(jnp.stack([seeds, seeds + 1]))
    np.testing.assert_array_equal(mapped[0], wanted)
    assert np.mean(np.asarray(mapped[1]) != np.asarray(wanted)) > 0.9


def test_jax_random_is_jaxs():
    seed = jnp.array([3, 7], jnp.uint32)
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    wanted = jax.random.bits(key, (5, 6), jnp.uint32)
    np.testing.assert_array_equal(noise.JaxRandom().bits((5, 6), seed), wanted)


def test_seeds_of_axes_that_share_noise():
    seeds = jnp.arange(2 * 3 * 4, dtype=jnp.uint32).reshape(2, 3, 4)
    shared = noise.shared_along(seeds, (1,))
    np.testing.assert_array_equal(shared, seeds.sum(2, keepdims=True))
    assert noise.shared_along(seeds[:, 0, 0], (0, 1)).shape == (2,)


def test_a_range_below_zero_has_noise_of_its_own():
    """Where the largest value of every channel is zero, and the smallest tells them."""
    row = -np.random.default_rng(0).uniform(0.5, 1, 2048).astype(np.float32)
    x = jnp.asarray(np.stack([row, row * 2]))
    stored = np.asarray(aqtlite.quantize(x, noisy(GRIDS["uint8"]), 1).qvalue)
    assert 0.1 < np.mean(stored[0] != stored[1]) < 0.9


def test_an_own_source_takes_part():
    source = alternating.Alternating(shift=1)
    how = noisy(GRIDS["int4"], source)
    assert config.from_json(config.to_json(how)) == how
    stored = aqtlite.quantize(jnp.full((3, 64), 0.5).at[:, 0].set(1.0), how, 1)
    values = np.asarray(stored.qvalue.astype("int8"))[:, 1:]
    assert (values == values[:, :1]).all() and set(values.ravel()) <= {3, 4}
    changed = config.update(how, {"noise.shift": 2})
    assert changed.noise == alternating.Alternating(shift=2)


@dataclasses.dataclass(frozen=True)
class Wrong(noise.Noise):
    dtype: str = "uint32"
    size: int = 3

    def bits(self, shape, seed):
        return jnp.zeros((self.size,) * len(shape), self.dtype)


@pytest.mark.parametrize(
    ("source", "error", "match"),
    [
        (Wrong(dtype="int32"), TypeError, r"Wrong\.bits must return uint32, got int32"),
        (Wrong(), ValueError, r"Wrong\.bits must return an array of shape \(4, 32\)"),
    ],
)
def test_an_own_source_is_checked(source, error, match):
    with pytest.raises(error, match=match):
        aqtlite.quantize(X, noisy(GRIDS["int4"], source), 1)


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"noise": None}, TypeError, r"noise must be an aqtlite\.noise\.Noise such as"),
        ({"noise_shared_axes": 0}, TypeError, "noise_shared_axes=0 is not a tuple"),
        ({"noise_shared_axes": ()}, ValueError, "noise_shared_axes is empty"),
        ({"noise_shared_axes": (1, 1)}, ValueError, "repeats an axis"),
        ({"noise_shared_axes": ("a",)}, TypeError, "'a', which is not an int"),
        (
            {"noise_shared_axes": (0,), "numerics": numerics.IntSymmetric(bits=4)},
            ValueError,
            "would have no effect, because rounding is to the nearest value",
        ),
    ],
)
def test_refuses(fields, error, match):
    with pytest.raises(error, match=match):
        config.Tensor(**{"numerics": GRIDS["int4"], **fields})


def test_an_axis_that_is_not_there():
    how = noisy(GRIDS["int4"], shared=(2,))
    with pytest.raises(ValueError, match=r"tensor_config\.noise_shared_axes=\(2,\)"):
        aqtlite.quantize(X, how, 1)
    raw = config.DotGeneralRaw(lhs=how)
    dot = aqtlite.make_dot_general(config.DotGeneral(dlhs=raw))
    with pytest.raises(ValueError, match=r"dlhs\.lhs\.noise_shared_axes=\(2,\) names"):
        jax.grad(lambda x: dot(x, X.T, MATMUL).sum())(X)


def test_tiles_share_no_noise():
    with pytest.raises(ValueError, match=r"^lhs\.noise_shared_axes: .* local_aqt"):
        config.DotGeneralRaw(
            lhs=noisy(GRIDS["int4"], shared=(0,)),
            local_aqt=config.LocalAqt(contraction_axis_shard_count=2),
        )


def test_blocks_share_no_noise():
    with pytest.raises(ValueError, match=r"^blocks=.* and noise_shared_axes=\(0,\)"):
        noisy(GRIDS["int4"], shared=(0,), blocks=config.Blocks(size=8))


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_blocks_are_rounded_without_bias(source):
    how = noisy(GRIDS["int4"], source, blocks=config.Blocks(size=8))
    q = jax.jit(lambda x: aqtlite.quantize(x, how, 1))(jnp.tile(X, (64, 8)))
    error = np.asarray(q.dequant(), np.float64) - np.tile(X, (64, 8))
    assert abs(error.mean()) < 5 * error.std() / np.sqrt(error.size)
    stored = np.asarray(q.qvalue.astype("int8")).reshape(64, 4, -1)
    assert len(np.unique(stored, axis=0)) == 64


def test_a_list_is_made_a_tuple():
    assert noisy(GRIDS["int4"], shared=[0, -1]).noise_shared_axes == (0, -1)
    assert tensor(4).to_nearest() == tensor(4)
