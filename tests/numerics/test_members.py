"""What holds for every grid: the properties of rounding, nearest and stochastic."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.numerics import members

HALF = np.uint32(1 << 31)
BITS = (0, HALF, 2**32 - 1)


def with_noise(grid):
    """The same values, rounded stochastically."""
    fields = {"stochastic_rounding": True}
    if hasattr(grid, "preserve_max_val"):
        fields["preserve_max_val"] = True
    return dataclasses.replace(grid, **fields)


def clipping(grid):
    return dataclasses.replace(grid, clip_gradient=True)


def inputs(grid):
    """Sorted: magnitudes of all kinds, grid points and what lies around the bound."""
    rng = np.random.default_rng(0)
    even = rng.uniform(-1.1 * grid.bound, 1.1 * grid.bound, 700)
    small = grid.bound * 2.0 ** rng.uniform(-30, 3, 300) * rng.choice([-1, 1], 300)
    steps = np.arange(-12, 12.5, 0.5)
    far = [0.0, grid.bound, -grid.bound, 3e38, -3e38, np.inf, -np.inf]
    return np.sort(np.concatenate([even, small, steps, far]).astype(np.float32))


@functools.partial(jax.jit, static_argnums=0)
def _rounded(grid, x, noise):
    """All that is compared, in one program."""

    def values(grid, x, bits=None):
        return grid.decode(grid.round(x, bits)) * jnp.float32(grid.unit)

    near = values(grid, x)
    of_near, of_negative = values(grid, jnp.stack([near, -x]))
    random = with_noise(grid)
    bits = jnp.stack([noise, *(jnp.full_like(noise, n) for n in BITS)])
    at_random = values(random, jnp.broadcast_to(x, bits.shape), bits)
    on_grid = at_random[1 + BITS.index(HALF)]
    if grid.zero_point_range is None:
        mask = clipping(grid).gradient_mask(x)
    else:
        zero_point = jnp.int32(sum(grid.zero_point_range) // 2)
        mask = clipping(grid).gradient_mask_around(x, zero_point)
    return {
        "near": near,
        "of near": of_near,
        "of negative": of_negative,
        "random": at_random,
        "at median": on_grid,
        "of on grid": values(random, jnp.broadcast_to(on_grid, bits.shape), bits),
        "mask": mask,
    }


@pytest.fixture(scope="module", params=members.GRIDS)
def case(request):
    grid = members.GRIDS[request.param]
    x = inputs(grid)
    noise = np.random.default_rng(1).integers(0, 2**32, x.shape, dtype=np.uint32)
    got = _rounded(grid, jnp.asarray(x), jnp.asarray(noise))
    return grid, x, jax.tree.map(np.asarray, got)


def test_rounds_monotonically_and_stays_on_the_grid(case):
    grid, _, got = case
    near = got["near"]
    assert (np.diff(near) >= 0).all()
    np.testing.assert_array_equal(got["of near"], near)
    assert (near == 0).any() == (grid.decode(grid.round(jnp.zeros(1), None)) == 0).all()


def test_values_are_bounded_and_every_end_is_reached(case):
    grid, x, got = case
    largest = np.abs(got["near"]).max()
    assert got["near"][0] == -largest or grid.bound == largest
    if getattr(grid, "clip", True):
        assert grid.bound - 0.5 <= largest <= grid.bound
    # Within a bucket of the grid, whose widths are at most that of the last one.
    inside = np.abs(x) <= grid.bound
    steps = np.diff(np.unique(got["near"]))
    assert (np.abs(got["near"] - x)[inside] <= steps.max() / 2 + 1e-3).all()


def test_symmetry(case):
    """Of all but ties of nf4, which go to the lower value."""
    grid, x, got = case
    if grid.name == "nf4":
        np.testing.assert_array_less(np.abs(got["of negative"] + got["near"]), 0.31)
        return
    halves = grid.unit == 0.5
    away = (np.trunc(x) != x) if halves else np.ones(x.shape, bool)
    np.testing.assert_array_equal(got["of negative"][away], -got["near"][away])


def test_stochastic_rounding_goes_to_a_neighbour_and_stays_on_the_grid(case):
    _, x, got = case
    low, high = got["random"][1], got["random"][3]
    for one in got["random"]:
        between = (one >= np.minimum(low, high)) & (one <= np.maximum(low, high))
        assert between.all()
    for one in got["of on grid"]:
        np.testing.assert_array_equal(one, got["at median"])
    # Both neighbours, and in between nothing but the value itself.
    below, above = (np.minimum(low, high), np.maximum(low, high))
    inside = np.abs(x) <= np.abs(got["at median"]).max()
    assert ((below <= x) & (x <= above) | ~inside | (below == above)).all()
    assert (below < above)[inside].mean() > 0.5


def test_the_median_of_stochastic_rounding_is_the_nearest(case):
    grid, x, got = case
    points = np.unique(got["at median"]).astype(np.float64)
    inside = np.abs(x) <= np.abs(points).max()
    distance = np.abs(x[inside, None].astype(np.float64) - points).min(1)
    error = np.abs(x - got["at median"].astype(np.float64))[inside]
    np.testing.assert_allclose(error, distance, rtol=1e-5, atol=1e-7 * grid.bound)


def test_gradient_stops_where_values_are_clipped(case):
    """Where a value is rounded to no farther than the grid reaches, it passes."""
    grid, x, got = case
    mask = got["mask"]
    if mask is None:
        assert not grid.clip
        return
    assert mask.dtype == np.bool_ and mask.any() and not mask.all()
    if grid.zero_point_range is None:
        largest = np.abs(got["near"]).max()
        np.testing.assert_array_equal(mask, np.abs(x) <= largest)
    else:
        smallest, last = grid.zero_point_range
        middle = (smallest + last) // 2
        stored = np.rint(x.astype(np.float64)) + middle
        tie = np.abs(x - np.trunc(np.clip(x, -999, 999))) == 0.5
        wanted = (stored >= smallest) & (stored <= last)
        np.testing.assert_array_equal(mask[~tie], wanted[~tie])


def test_stochastic_rounding_needs_noise(case):
    grid, _, _ = case
    random = with_noise(grid)
    assert random.needs_noise and not grid.needs_noise
    nearest = random.to_nearest()
    assert not nearest.needs_noise and with_noise(nearest) == random
    assert grid.to_nearest() is grid or grid.to_nearest() == grid
    with pytest.raises(ValueError, match="needs random bits"):
        random.round(jnp.ones(2), None)
