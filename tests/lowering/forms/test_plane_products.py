"""The kernels of planes of bytes: their sums are exact."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite.lowering.forms import (
    custom_call,
    integer_products,
    panel_products,
    plane_kernel,
    plane_products,
    planes,
)
from aqtlite.lowering.forms.integer_products import Instructions
from tests.lowering.forms import emulated

pytestmark = pytest.mark.code("quick")


def integers(shape, bits, seed=0):
    largest = 2 ** (bits - 1)
    values = np.random.default_rng(seed).integers(-largest, largest, shape)
    return values.astype(np.int8)


def check_sums(bits, rows, channels, length):
    """Batches of two, the second one of the largest magnitudes."""
    if not panel_products.runs_here():
        return
    values = integers((2, channels, length), bits)
    queries = integers((2, rows, channels), 8, seed=1)
    weights = integers((2, rows, length), 8, seed=2)
    values[1] = -(2 ** (bits - 1))
    queries[1], weights[1] = -128, 127
    packed = jax.jit(planes.pack, static_argnums=1)(values, bits)

    @jax.jit
    def sums(queries, weights, packed):
        return (
            plane_products.of_channels(queries, packed, bits),
            plane_products.of_positions(weights, packed, channels, bits),
        )

    values = values.astype(int)
    by_channels, by_positions = sums(queries, weights, packed)
    np.testing.assert_array_equal(by_channels, queries.astype(int) @ values)
    np.testing.assert_array_equal(
        by_positions, weights.astype(int) @ values.transpose(0, 2, 1)
    )


@pytest.mark.parametrize(
    ("bits", "rows", "channels", "length"),
    [
        pytest.param(4, 1, 64, 64, id="one line of positions"),
        pytest.param(3, 3, 80, 99, id="positions that are no whole line"),
        pytest.param(4, 6, 13, 1500, id="channels that are no whole byte"),
        pytest.param(2, 5, 16, 130, id="two bits"),
    ],
)
def test_sums_are_exact_at_the_largest_magnitudes(bits, rows, channels, length):
    check_sums(bits, rows, channels, length)


def test_sums_in_wide_vectors(monkeypatch):
    """Of 64 bytes, as on processors with AVX-512."""

    def registered(kind, bits, instructions):
        name = f"tested_planes_{kind.__name__}_{bits}"
        custom_call.register(name, lambda: kind(bits, instructions))
        return name

    monkeypatch.setattr(Instructions, "products", emulated.Dots())
    monkeypatch.setattr(
        integer_products, "of_processor", lambda: Instructions.AVX512_VNNI
    )
    monkeypatch.setattr(plane_kernel, "registered", registered)
    check_sums(3, 3, 24, 150)


def test_threads_divide_sums():
    """Each sums parts of a batch, in another order each time."""
    if not panel_products.runs_here():
        return
    values, x = integers((64, 64, 256), 4), integers((64, 8, 64), 8, seed=1)
    packed = planes.pack(jnp.asarray(values), 4)
    sums = jax.jit(plane_products.of_channels, static_argnums=2)
    wanted = x.astype(int) @ values.astype(int)
    for _ in range(5):
        np.testing.assert_array_equal(sums(x, packed, 4), wanted)


@pytest.mark.parametrize("axes", [(None, 0), (0, None)])
def test_mapped_axes_are_axes_of_the_batch(axes):
    if not panel_products.runs_here():
        return
    values, x = integers((3, 2, 16, 70), 3), integers((3, 2, 1, 16), 8, seed=1)
    values, x = (
        one if axis == 0 else one[0]
        for one, axis in zip((values, x), reversed(axes), strict=True)
    )
    packed = planes.pack(jnp.asarray(values), 3)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=axes)
    def sums(x, packed):
        return plane_products.of_channels(x, packed, 3)

    np.testing.assert_array_equal(sums(x, packed), x.astype(int) @ values.astype(int))
