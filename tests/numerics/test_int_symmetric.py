import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aqtlite
from aqtlite import config, noise
from aqtlite.numerics import IntSymmetric
from tests.common import MATMUL, normal, rms_error, tensor


@pytest.mark.parametrize(
    ("preserve_zero", "preserve_max_val", "bounds"),
    [
        (False, False, {8: 128.0, 2: 2.0, 1: 1.0}),
        (False, True, {8: 127.5, 2: 1.5, 1: 0.5}),
        (True, False, {8: 127.5, 2: 1.5}),
        (True, True, {8: 127.0, 2: 1.0}),
    ],
)
def test_bounds(preserve_zero, preserve_max_val, bounds):
    for bits, bound in bounds.items():
        grid = IntSymmetric(
            bits=bits, preserve_zero=preserve_zero, preserve_max_val=preserve_max_val
        )
        assert grid.bound == bound
        assert grid.unit == (1.0 if preserve_zero else 0.5)


@pytest.mark.parametrize(
    ("bits", "preserve_zero", "dtype", "points"),
    [
        (12, True, "int16", 4095),
        (9, False, "int16", 512),
        (9, True, "int16", 511),
        (8, True, "int8", 255),
        (8, False, "int16", 256),
        (7, False, "int8", 128),
        (5, True, "int8", 31),
        (4, True, "int4", 15),
        (4, False, "int8", 16),
        (3, False, "int4", 8),
        (2, True, "int4", 3),
        (1, False, "int4", 2),
    ],
)
def test_grid_points(bits, preserve_zero, dtype, points):
    """Storage and number of grid points, evenly spaced and symmetric around zero."""
    grid = IntSymmetric(bits=bits, preserve_zero=preserve_zero)
    stored = grid.round(jnp.linspace(-(2.0**12), 2.0**12, 2**17 + 1), None)
    assert stored.dtype == grid.storage_dtype == dtype
    values = np.unique(np.asarray(stored, np.float64)) * grid.unit
    assert len(values) == points
    np.testing.assert_array_equal(values, -values[::-1])
    np.testing.assert_array_equal(np.diff(values), 1.0)
    assert (0.0 in values) == preserve_zero


def test_one_bit_has_no_zero_by_default():
    assert IntSymmetric(bits=1) == IntSymmetric(bits=1, preserve_zero=False)
    assert IntSymmetric(bits=2) == IntSymmetric(bits=2, preserve_zero=True)
    assert len({IntSymmetric(bits=8), IntSymmetric(bits=8), IntSymmetric(bits=7)}) == 2


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        IntSymmetric(bits=8).bits = 4


def test_ties_go_to_even():
    got = IntSymmetric(bits=8).round(jnp.array([0.5, 1.5, 2.5, -0.5, -1.5]), None)
    assert got.tolist() == [0, 2, 2, 0, -2]


def test_without_clip_the_storage_saturates():
    scaled = jnp.array([-40.0, 40.0])
    assert IntSymmetric(bits=3).round(scaled, None).tolist() == [-3, 3]
    assert IntSymmetric(bits=3, clip=False).round(scaled, None).tolist() == [-7, 7]


SMALL = st.lists(st.floats(-140, 140, width=32), min_size=16, max_size=16)


@settings(max_examples=60, deadline=None)
@given(values=SMALL, bits=st.sampled_from([8, 3, 1]))
def test_rounds_to_the_nearest_grid_point(values, bits):
    grid = IntSymmetric(bits=bits)
    scaled = np.array(values, np.float32)
    points = np.arange(-(2 ** (bits - 1)) + grid.unit, 2 ** (bits - 1))
    got = np.asarray(grid.round(jnp.asarray(scaled), None), np.float64) * grid.unit
    nearest = np.min(np.abs(points - scaled[:, None].astype(np.float64)), axis=1)
    np.testing.assert_array_equal(np.abs(got - scaled), nearest)


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_stochastic_rounding_goes_to_a_neighbour(bits):
    """Never past the two grid points around a value; a grid point stays itself."""
    grid = IntSymmetric(bits=bits, preserve_max_val=True, stochastic_rounding=True)
    bound = grid.bound
    scaled = np.concatenate(
        [np.linspace(-bound, bound, 997), np.arange(-bound, bound + 1)]
    ).astype(np.float32)

    @jax.jit
    def rounded(key):
        return grid.round(jnp.asarray(scaled), noise.random_bits(scaled.shape, key))

    for seed in range(4):
        stored = rounded(np.array([seed, 7], np.uint32))
        got = np.asarray(stored, np.float64) * grid.unit
        offset = 0 if grid.preserve_zero else 0.5
        # Positions are resolved to 2^-16 of a step.
        low = np.floor(scaled.astype(np.float64) - offset + 2**-16) + offset
        high = np.ceil(scaled.astype(np.float64) - offset - 2**-16) + offset
        assert np.all((got == low) | (got == high))
        np.testing.assert_array_equal(got[997:], scaled[997:])


@pytest.mark.parametrize("bits", [(9, 9), (12, 12), (16, 8), (16, 16), (16, None)])
def test_wide_integers_are_contracted_exactly(bits):
    """Where int32 holds the sums, and to float32's precision where it does not."""
    lhs_grid, rhs_grid = (
        IntSymmetric(bits=15, preserve_zero=False)
        if one is None
        else IntSymmetric(bits=one)
        for one in bits
    )
    lhs, rhs = config.Tensor(numerics=lhs_grid), config.Tensor(numerics=rhs_grid)
    cfg = config.DotGeneral(fwd=config.DotGeneralRaw(lhs=lhs, rhs=rhs))

    @jax.jit
    def quantized_and_contracted(x, w):
        a, b = aqtlite.quantize(x, lhs, 1), aqtlite.quantize(w, rhs, 0)
        return a, b, aqtlite.make_dot_general(cfg)(x, w, MATMUL)

    for size in (2, 8, 33):  # A sum of one element stays in float.
        x, w = np.array(normal((4, size))), np.array(normal((size, 3), 1))
        x[0], w[:, 0] = 1, -1
        a, b, out = quantized_and_contracted(x, w)
        sums = np.asarray(a.qvalue, np.int64) @ np.asarray(b.qvalue, np.int64)
        wanted = sums.astype(np.float32) * np.asarray(b.scale) * np.asarray(a.scale)
        largest = lhs_grid.largest_stored * rhs_grid.largest_stored
        if largest * size < 2**31:
            np.testing.assert_array_equal(out, wanted)
        np.testing.assert_allclose(
            out, wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max()
        )


@pytest.mark.code("quick")
@pytest.mark.parametrize("bits", [9, 12, 16])
@pytest.mark.parametrize("other", [8, None], ids=["int8", "float"])
def test_wide_integers_are_close_in_both_directions(bits, other):
    how = config.Tensor(numerics=IntSymmetric(bits=bits))
    reused = config.Tensor(use_fwd_quant=True)
    cfg = config.DotGeneral(
        fwd=config.DotGeneralRaw(lhs=tensor(other), rhs=how),
        dlhs=config.DotGeneralRaw(lhs=how, rhs=reused),
        drhs=config.DotGeneralRaw(lhs=how, rhs=reused if other else config.Tensor()),
    )
    dot = aqtlite.make_dot_general(cfg)
    x, w, g = normal((4, 16)), normal((16, 3), 1), normal((4, 3), 2)

    @jax.jit
    def run(x, w, g):
        out, vjp = jax.vjp(lambda x, w: dot(x, w, MATMUL), x, w)
        return out, *vjp(g)

    # Of a step, 2^(1 - bits) of the largest magnitude, an operand is off by 0.29 rms.
    bound = 0.02 if other else 3 * 2.0**-bits + 2e-6
    for got, wanted in zip(run(x, w, g), (x @ w, g @ w.T, x.T @ g), strict=True):
        assert rms_error(got, wanted) < bound


def test_gradient_mask():
    scaled = jnp.array([-127.6, -127.0, 0.0, 127.0, 127.1])
    assert IntSymmetric(bits=8).gradient_mask(scaled) is None
    mask = IntSymmetric(bits=8, clip_gradient=True).gradient_mask(scaled)
    assert mask.tolist() == [False, True, True, True, False]
    assert (
        IntSymmetric(bits=8, clip=False, clip_gradient=True).gradient_mask(scaled)
        is None
    )


def test_static_argument_of_jit():
    rounded = jax.jit(lambda x, grid: grid.round(x, None), static_argnums=1)(
        jnp.array([1.4]), IntSymmetric(bits=8)
    )
    assert rounded.tolist() == [1]


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"bits": 0}, ValueError, "from 1 to 16, got 0"),
        ({"bits": 17}, ValueError, "from 1 to 16, got 17"),
        ({"bits": 16, "preserve_zero": False}, ValueError, "use at most 15 bits, or"),
        ({"bits": 8.0}, TypeError, "must be an int"),
        ({"bits": True}, TypeError, "must be an int"),
        ({"bits": 1, "preserve_zero": True}, ValueError, "no value but zero"),
        ({"bits": 8, "clip": 1}, TypeError, "clip must be a bool"),
        ({"bits": 8, "stochastic_rounding": True}, ValueError, "preserve_max_val"),
    ],
)
def test_refuses(kwargs, error, match):
    with pytest.raises(error, match=match):
        IntSymmetric(**kwargs)


def test_rounds_float64_too():
    with jax.enable_x64(True):
        rounded = IntSymmetric(bits=8).round(
            jnp.array([0.3, 2.5, -0.0, 200.0], jnp.float64), None
        )
    assert rounded.tolist() == [0, 2, 0, 127]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sum_of_rounded(grid, count, value):
    random = noise.random_bits((count,), jnp.array([5, 7], jnp.uint32))
    stored = grid.round(jnp.full(count, value), random)
    return jnp.sum(stored, dtype=jnp.int32)


@pytest.mark.parametrize("bits", [8, 1])
@pytest.mark.parametrize("position", [1e-4, 1e-5, -3e-6, 3e-7])
def test_elements_far_below_a_step_are_rounded_without_bias(bits, position):
    """Also below 2^-16 of a step, where noise of few bits never reaches."""
    grid = IntSymmetric(bits=bits, preserve_max_val=True, stochastic_rounding=True)
    base = 0.0 if grid.preserve_zero else 0.5
    count = 2**23
    exact = np.float32(base + position)
    moved = int(_sum_of_rounded(grid, count, exact)) * grid.unit - count * base
    distance = abs(float(exact) - base)
    expected = count * distance * np.sign(position) * (bits > 1 or position < 0)
    assert abs(moved - expected) < 5 * np.sqrt(count * distance + 1)
