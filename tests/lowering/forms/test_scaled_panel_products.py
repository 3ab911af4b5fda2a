"""Scaled sums of weights that are codes: their bits are those of int8 of equal values.

`test_panel_products` has those of integers.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import aqtlite
from aqtlite import numerics
from aqtlite.lowering.forms import (
    integer_products,
    panel_products,
    panels,
    scaled_panel_products,
)
from aqtlite.lowering.forms.integer_products import Instructions
from aqtlite.lowering.forms.panels import Panels
from aqtlite.lowering.forms.weight_coding import Coding
from aqtlite.qtensor import float_codes
from tests.lowering.forms import emulated

NAME = "aqtlite_panels"
OF_BYTES = [one for one in Instructions if not one.takes_int16]
LOWEST, HIGHEST, NEGATIVE_ZERO = 15, 7, 8
"""The codes of -6, 6 and -0."""

of_integers = functools.partial(scaled_panel_products.of_integers, coding=Coding.E2M1)
of_floats = functools.partial(scaled_panel_products.of_floats, coding=Coding.E2M1)


def doubled(codes):
    """Twice the values of codes, int8."""
    grid = numerics.Float.from_dtype("float4_e2m1fn")
    values = float_codes.decode(jnp.asarray(codes, jnp.uint4), grid)
    return (2 * values.astype(jnp.float32)).astype(jnp.int8)


def as_int4(codes):
    """Codes as weights are given."""
    return lax.bitcast_convert_type(jnp.asarray(codes, jnp.uint4), jnp.int4)


def operands(rows, columns, products, tiles):
    """Rows of int8, codes, and scales of both, with all extremes of the first two."""
    rng = np.random.default_rng(rows)
    x = rng.integers(-128, 128, (rows, products)).astype(np.int8)
    codes = rng.integers(0, 16, (columns, products)).astype(np.uint8)
    x[0], x[-1] = -128, 127 if rows > 1 else -128
    codes[:3], codes[-1] = [[LOWEST], [HIGHEST], [NEGATIVE_ZERO]], LOWEST
    codes[3] = np.where(np.arange(products) % 2, LOWEST, HIGHEST)
    factors, scales = (
        rng.uniform(-2, 2, (n, tiles)).astype(np.float32) for n in (rows, columns)
    )
    return x, codes, factors, scales


def in_numpy(x, values, factors, scales):
    """Sums of int64, scaled and added in the order of the kernel."""
    tiles = factors.shape[1]
    cut = (one.astype(int).reshape(len(one), tiles, -1) for one in (x, values))
    total = np.float32(0)
    for tile, sums in enumerate(np.einsum("rtk,ntk->trn", *cut)):
        scaled = sums.astype(np.float32) * scales[:, tile]
        total = total + scaled * factors[:, tile, None]
    return total


@pytest.fixture
def take(monkeypatch):
    """Has the kernel take instructions; returns whether this processor has them."""

    def given(instructions):
        widest = integer_products.of_processor()
        monkeypatch.setattr(integer_products, "of_processor", lambda: instructions)
        return widest is not None and instructions <= widest

    return given


@pytest.mark.parametrize(
    ("rows", "columns", "products", "tiles"),
    [
        pytest.param(1, 17, 64, 1, id="a row"),
        pytest.param(3, 33, 256, 8, id="single blocks"),
        pytest.param(8, 17, 256, 1, id="one tile"),
        pytest.param(17, 33, 256, 2, id="tiles of several blocks"),
        pytest.param(64, 1040, 512, 8, id="columns that threads divide"),
    ],
)
@pytest.mark.parametrize("instructions", OF_BYTES)
def test_codes_have_the_bits_of_int8_of_twice_their_values(
    rows, columns, products, tiles, instructions, take
):
    if not take(instructions) or not panel_products.runs_here():
        pytest.skip("this processor has no such kernel")
    x, codes, factors, scales = operands(rows, columns, products, tiles)
    weights, values = as_int4(codes), doubled(codes)

    @jax.jit
    def sums(x, weights, values):
        of_int8 = scaled_panel_products.of_integers(x, values, factors, scales)
        return of_integers(x, weights, factors, scales), of_int8

    got, of_int8 = sums(x, weights, values)
    np.testing.assert_array_equal(got, of_int8)
    np.testing.assert_array_equal(got, in_numpy(x, np.asarray(values), factors, scales))
    for dtype in (jnp.float32, jnp.bfloat16):
        # The extremes of digits: the largest magnitudes below a power of two.
        floats = (x / 128 * (1 + factors[:, :1])).astype(dtype)
        floats[0], floats[-1] = np.nextafter(dtype(2), dtype(0)), -2

        @jax.jit
        def of_rows(x, weights, values, dtype=dtype):
            of_int8 = scaled_panel_products.of_floats(x, values, scales, dtype)
            return of_floats(x, weights, scales, dtype), of_int8

        np.testing.assert_array_equal(*of_rows(floats, weights, values))


@pytest.mark.parametrize("instructions", OF_BYTES)
def test_all_codes_by_all_extremes_are_exact(instructions, take):
    """Pairs of neighbouring products are added first, then those of a block."""
    if not take(instructions) or not panel_products.runs_here():
        pytest.skip("this processor has no such kernel")
    of_four = np.array(list(itertools.product((0, 1), repeat=4)))
    patterns = np.concatenate([np.tile(of_four, 16), of_four.repeat(16, 1)])
    x = np.where(patterns, 127, -128).astype(np.int8).repeat(2, 0)
    extremes = np.where(patterns, HIGHEST, LOWEST)
    of_each = np.repeat(np.arange(16)[:, None], 64, 1)
    codes = np.concatenate([extremes, of_each, of_each.T.repeat(4, 1)])
    factors, scales = (np.ones((len(one), 1), np.float32) for one in (x, codes))
    got = jax.jit(lambda *args: of_integers(*args, factors, scales))(x, as_int4(codes))
    wanted = x.astype(int) @ np.asarray(doubled(codes)).astype(int).T
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("instructions", OF_BYTES)
def test_sums_of_as_many_products_as_the_kernel_reads_are_exact(instructions, take):
    """Those of raised weights leave int32."""
    if not take(instructions) or not panel_products.runs_here():
        pytest.skip("this processor has no such kernel")
    products = 2**20
    assert panel_products.reads(16, products, 4)
    assert not panel_products.reads(16, products + 32, 4)
    codes, ones = jnp.repeat(jnp.array([LOWEST, HIGHEST]), 8), jnp.ones((16, 1))

    @jax.jit
    def sums():
        x = jnp.full((16, products), -128, jnp.int8)
        weights = as_int4(jnp.broadcast_to(codes[:, None], (16, products)))
        of_rows = of_floats(x.astype(jnp.float32), weights, ones, jnp.float32)
        return of_integers(x, weights, ones, ones), of_rows

    wanted = np.float32(12 * 128) * products * np.repeat([1, -1], 8)
    for got in sums():
        np.testing.assert_array_equal(got, np.broadcast_to(wanted, got.shape))


@pytest.mark.parametrize(("rows", "columns"), [(15, 40), (101, 17)])
@pytest.mark.parametrize("tiles", [1, 4])
def test_codes_by_amx_have_equal_bits(rows, columns, tiles, monkeypatch):
    """By other instructions, so that any processor with AVX2 tests it."""
    if not panel_products.runs_here():
        pytest.skip("there is no kernel for this processor")
    x, codes, factors, scales = operands(rows, columns, 256, tiles)
    emulated.take_amx(monkeypatch)
    monkeypatch.setattr(panel_products, "_instructions", lambda *_: Instructions.AMX)

    @jax.jit
    def sums(x, weights, values):
        floats = x / np.float32(100)
        return [
            (
                of_integers(x, given, factors, scales, coding=coding),
                of_floats(floats, given, scales, jnp.float32, coding=coding),
            )
            for given, coding in ((weights, Coding.E2M1), (values, Coding.INTEGERS))
        ]

    of_codes, of_int8 = sums(x, as_int4(codes), doubled(codes))
    jax.tree.map(np.testing.assert_array_equal, of_codes, of_int8)


@pytest.mark.parametrize("is_packed", [False, True])
def test_codes_are_packed_as_integers_are(is_packed):
    """By `aqtlite.compile_serving`, or as panels that are given."""
    x, codes, factors, scales = operands(8, 33, 128, 4)

    def apply(params, x):
        weights = params["codes"]
        if is_packed:
            weights = Panels(weights, 33, 4)
        return of_integers(x, weights, factors, params["scales"])

    weights = as_int4(codes)
    given = panels.of_weights(weights) if is_packed else weights
    params = {"codes": given, "scales": jnp.asarray(scales)}
    wanted = in_numpy(x, np.asarray(doubled(codes)), factors, scales)
    program = aqtlite.compile_serving(apply, params, x)
    for got in (jax.jit(apply)(params, x), program(x)):
        if panel_products.runs_here():
            np.testing.assert_array_equal(got, wanted)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-2)
    if panel_products.runs_here():
        assert NAME in program.compiled.as_text()
        dtypes = [x.dtype for x in jax.tree.leaves(program.compiled.in_avals)]
        assert jnp.uint8 in dtypes and jnp.int4 not in dtypes


def test_without_the_kernel_codes_are_decoded():
    """Where a program is transformed, and in derivatives."""
    x, codes, factors, scales = operands(3, 17, 64, 2)
    weights, values = as_int4(codes), doubled(codes)

    def loss(scales, weights, call):
        return jnp.sum(jnp.sin(call(x, weights, factors, scales)))

    of_int8 = scaled_panel_products.of_integers
    got, wanted = (
        jax.jit(jax.grad(functools.partial(loss, call=call)))(scales, one)
        for call, one in ((of_integers, weights), (of_int8, values))
    )
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.code("quick")
def test_codes_have_four_bits():
    x, codes, factors, scales = operands(3, 17, 64, 2)
    with pytest.raises(ValueError, match="codes of E2M1 have 4 bits, got weights of 8"):
        of_integers(x, doubled(codes), factors, scales)
