"""`MseSearch` and `SnrSearch`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import aqtlite
from aqtlite import config, numerics
from aqtlite.calibration import (
    AbsMax,
    MinMax,
    MseOverBatches,
    MseSearch,
    Range,
    SnrSearch,
    scale_and_zero_point,
)
from aqtlite.quantization import quantizer
from tests.common import normal, quick_jit, tensor
from tests.extensions import affine, e4m3, ternary

pytestmark = pytest.mark.code("quick")

CANDIDATES = (1.0, 0.995, 0.98, 0.9, 0.8, 0.6, 0.4)
GRIDS = {
    "int8": numerics.IntSymmetric(bits=8),
    "int4": numerics.IntSymmetric(bits=4, preserve_max_val=True),
    "int2": numerics.IntSymmetric(bits=2),
    "int1": numerics.IntSymmetric(bits=1),
    "halves": numerics.IntSymmetric(bits=3, preserve_zero=False),
    "unclipped": numerics.IntSymmetric(bits=4, clip=False),
    "float8": e4m3.E4M3(),
    "table": ternary.Ternary(),
    "uint8": numerics.IntAffine(bits=8),
    "uint2": numerics.IntAffine(bits=2),
    "int4_affine": numerics.IntAffine(bits=4, signed=True, stochastic_rounding=True),
    "own_affine": affine.AffineUint8(),
}


def squared_error(x, cfg):
    quantized = aqtlite.quantize(x, cfg, 1).dequant()
    difference = np.asarray(x, np.float64) - np.asarray(quantized, np.float64)
    return np.mean(difference**2, axis=1)


@functools.partial(quick_jit, static_argnums=(1, 2))
def _fractions(x, grid, candidates):
    found = MseSearch(candidates).range(x, (1,), grid, ())
    has_low = grid.zero_point_range is not None
    whole = (
        MinMax().range(x, (1,), grid, ()).high if has_low else AbsMax().bound(x, (1,))
    )
    return found.high / whole


def chosen(x, grid, candidates=CANDIDATES):
    """The fraction of each row's largest magnitude, or largest value."""
    return np.asarray(_fractions(x, grid, candidates))[:, 0]


@functools.partial(quick_jit, static_argnums=1)
def quantized_at(x, grid, fraction):
    """Dequantized to a fraction of the whole range, rounded to nearest."""
    nearest = config.Tensor(numerics=grid.to_nearest())
    whole = Range(AbsMax().bound(x, (1,)))
    if grid.zero_point_range is not None:
        whole = MinMax().range(x, (1,), grid, ())
    ends = Range(*(None if end is None else end * fraction for end in whole))
    scale, zero_point = scale_and_zero_point(ends, grid, po2=False)
    calibrated = quantizer.Calibrated(ends.high, scale, zero_point, ends.low)
    return quantizer.round_to_grid(x, calibrated, nearest, None).dequant()


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_the_error_of_the_choice_is_the_least(grid):
    x = normal((40, 64)) * jnp.where(normal((40, 64), 1) > 0, 1, 0.3)
    plain = np.asarray(CANDIDATES, np.float32)

    def error_of(fraction):
        difference = np.asarray(quantized_at(x, grid, fraction), np.float64) - x
        return np.mean(difference**2, axis=1)

    each = np.array([error_of(jnp.float32(c)) for c in CANDIDATES])
    found = chosen(x, grid)
    assert np.all(np.isclose(found[:, None], plain, rtol=1e-6).any(1))
    got = error_of(jnp.asarray(found)[:, None])
    np.testing.assert_allclose(got, each.min(0), rtol=1e-4)
    assert np.any(each.min(0) < each[0])


FLOATS = st.floats(-(2.0**90), 2.0**90, width=32, allow_subnormal=False)


@settings(max_examples=25, deadline=None)
@given(x=hnp.arrays(np.float32, (2, 8), elements=FLOATS))
def test_never_worse_than_the_largest_magnitude(x):
    grid = numerics.IntSymmetric(bits=4)
    found = config.Tensor(numerics=grid, calibration=MseSearch(CANDIDATES))
    # In units of the largest magnitude, whose square could overflow.
    unit = np.maximum(np.abs(x).max(1), 1e-30).astype(np.float64) ** 2
    got, largest = (
        squared_error(jnp.asarray(x), cfg) / unit
        for cfg in (found, dataclasses.replace(found, calibration=AbsMax()))
    )
    assert np.all(got <= largest * (1 + 1e-5) + 1e-12)


def test_of_equal_errors_the_larger_bound_is_chosen():
    """Values that are grid points at every candidate."""
    grid = numerics.IntSymmetric(bits=8, preserve_max_val=True)
    x = jnp.array([[127.0, 0, 0, 0, 64], [0, 0, 0, 0, 0]])
    assert chosen(x[:1], grid, (0.25, 1.0)).tolist() == [1.0]
    zeros = jnp.zeros((1, 4))
    high = MseSearch((0.5, 1.0)).range(zeros, (1,), grid, ()).high
    assert high.tolist() == [[0.0]]


def test_channels_choose_for_themselves():
    x = jnp.array([[4.0] + 99 * [0.5], [1.0, 0.5] + 98 * [-1.0]])
    grid = numerics.IntSymmetric(bits=3)
    assert chosen(x, grid, (1.0, 0.5, 0.25)).tolist() == [0.5, 1.0]


def test_stochastic_grids_are_searched_with_nearest_rounding():
    x = normal((20, 64))
    nearest = numerics.IntSymmetric(bits=4, preserve_max_val=True)
    noisy = dataclasses.replace(nearest, stochastic_rounding=True)
    np.testing.assert_array_equal(chosen(x, noisy), chosen(x, nearest))


def test_largest_magnitudes_of_nvfp4_become_four_or_six():
    cfg = config.nvfp4().fwd.lhs
    both = dataclasses.replace(cfg, calibration=MseSearch((1.5, 1.0)))
    x = normal((16, 256))
    found, six = (aqtlite.quantize(x, how, 1) for how in (both, cfg))
    error, usual = (jnp.square(q.dequant() - x).sum() for q in (found, six))
    assert error < 0.9 * usual
    largest = jnp.abs(found.qvalue.astype(jnp.float32)).reshape(16, 16, 16).max(-1)
    assert set(np.unique(largest).tolist()) == {4.0, 6.0}


def test_a_bound_above_the_largest_magnitude_does_not_overflow():
    grid = numerics.Float.from_dtype("float4_e2m1fn")
    top = float(jnp.finfo(jnp.float32).max)
    x = jnp.array([[top] * 3, [jnp.inf, 1, 1], [-top, 0, 0]])
    high = MseSearch((1.5,)).range(x, (1,), grid, ()).high
    assert high[:, 0].tolist() == [top, np.inf, top]


def test_scales_do_not_change_the_choice():
    x = normal((20, 64))
    wanted = chosen(x, GRIDS["int4"])
    for factor in (2.0**100, 2.0**-100):
        np.testing.assert_array_equal(chosen(x * factor, GRIDS["int4"]), wanted)
    assert len(set(wanted.tolist())) > 1


def test_gradient_takes_the_choice_as_a_constant():
    x = normal((5, 64))

    def high(x):
        return MseSearch(CANDIDATES).range(x, (1,), GRIDS["int4"], ()).high

    gradient = np.asarray(jax.grad(lambda x: high(x).sum())(x))
    assert ((gradient != 0).sum(1) == 1).all()
    np.testing.assert_allclose(np.abs(gradient).sum(1), chosen(x, GRIDS["int4"]))


@pytest.mark.code("users")
def test_memory_does_not_grow_with_the_candidates():
    x = normal((256, 64))

    def temporary_bytes(count):
        cfg = tensor(4, calibration=MseSearch(tuple(1 - i / 64 for i in range(count))))
        compiled = jax.jit(lambda x: aqtlite.quantize(x, cfg, 1)).lower(x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(32) < temporary_bytes(2) + x.nbytes


@pytest.mark.parametrize("search", [MseSearch, SnrSearch])
def test_refuses(search):
    name = search.__name__
    for bad in ((), (0.5, 2.5), (0.0, 1.0), (float("nan"),)):
        with pytest.raises(ValueError, match=rf"{name}\.candidates"):
            search(bad)
    for bad in (None, 0.5, "0.5", (True,), (None, 1.0)):
        with pytest.raises(TypeError, match=rf"{name}\.candidates"):
            search(bad)


def test_equal_and_hashable():
    one, other = MseSearch([0.5, 1]), MseSearch((1.0, 0.5, 0.5))
    assert one == other and hash(one) == hash(other)
    assert one != SnrSearch((1.0, 0.5))


@pytest.mark.parametrize(
    "made",
    [MseSearch(), SnrSearch(), MseOverBatches()],
)
def test_candidates_are_those_of_all_searches_by_default(made):
    assert (len(made.candidates), made.candidates[0], made.candidates[-1]) == (
        40,
        1.0,
        0.22,
    )
