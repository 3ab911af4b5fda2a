"""The kernel of codes of a table: its bits depend on a row and a column alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import aqtlite
from aqtlite import numerics
from aqtlite.lowering.forms import panel_products, processor, table_products
from aqtlite.lowering.forms.table_kernel import Kernel, Layout

NAME = "aqtlite_table"
NF4 = tuple(np.asarray(numerics.NormalFloat().decode(jnp.arange(16))).tolist())
# A table whose values all differ in sign or magnitude, and need all of their bits.
OTHER = tuple(float(np.float32((-1) ** n * 1.1**n / 3)) for n in range(16))
UNIT = 2.0**-24

pytestmark = pytest.mark.skipif(
    not panel_products.runs_here(), reason="there is no kernel for this processor"
)

SIZES = [
    pytest.param(16, 16, 16, id="a panel of the smallest tile"),
    pytest.param(33, 96, 32, id="tiles, a last panel that overlaps"),
    pytest.param(17, 96, 48, id="tiles of several runs"),
    pytest.param(40, 320, 320, id="a column is a tile"),
    pytest.param(16, 1216, 64, id="several blocks"),
    pytest.param(1040, 512, 128, id="columns that threads divide"),
]


def operands(columns, products, of_tile, rows=64):
    """Rows, codes and scales."""
    random = np.random.default_rng(columns)
    x = random.normal(size=(rows, products)).astype(np.float32)
    codes = random.integers(0, 16, (columns, products)).astype(np.uint8)
    scales = random.normal(size=(columns, products // of_tile)).astype(np.float32)
    return x, codes, scales


def as_int4(codes):
    """Codes that take four bits."""
    return lax.bitcast_convert_type(jnp.asarray(codes).astype(jnp.uint4), jnp.int4)


def weights_of(codes, scales, table):
    tiles = np.asarray(table)[codes].reshape(*scales.shape, -1)
    return (tiles * scales[..., None].astype(float)).reshape(codes.shape)


@functools.partial(jax.jit, static_argnums=3)
def sums(x, codes, scales, table=NF4):
    return table_products.sums(x, codes, scales, table)


@jax.jit
def sums_of_columns(x, codes, scales):
    return table_products.sums_of_columns(x, codes, scales, NF4)


@pytest.fixture
def by_avx2(monkeypatch):
    """Has kernels written for AVX2 when called."""

    def take():
        jax.clear_caches()
        monkeypatch.setattr(processor, "has_avx512", lambda: False)

    yield take
    jax.clear_caches()


@pytest.mark.parametrize("table", [NF4, OTHER], ids=["nf4", "other"])
@pytest.mark.parametrize(("columns", "products", "of_tile"), SIZES)
@pytest.mark.parametrize("rows", [1, 19])
def test_sums_are_those_of_float64(rows, columns, products, of_tile, table):
    """Up to 16 roundings of the sum of magnitudes, where a run alone could have 64."""
    x, codes, scales = operands(columns, products, of_tile, rows)
    weights = weights_of(codes, scales, table)
    wanted, sizes = x.astype(float) @ weights.T, abs(x).astype(float) @ abs(weights).T
    got = sums(x, codes, scales, table)
    assert (abs(got - wanted) <= 16 * UNIT * sizes).all()
    for kind in (Layout.BYTES, Layout.PAIRS):
        of = table_products._TableSums(table, kind)
        plain = of.reference(
            codes if kind is Layout.BYTES else as_int4(codes), x, scales
        )
        assert (abs(plain - wanted) <= 16 * UNIT * sizes).all()


@pytest.mark.parametrize(("columns", "products", "of_tile"), SIZES)
def test_layouts_and_numbers_of_rows_have_equal_bits(columns, products, of_tile):
    x, codes, scales = operands(columns, products, of_tile)
    wanted = np.concatenate([sums(row[None], codes, scales) for row in x])
    signed = np.where(codes < 8, codes, codes - 16).astype(np.int8)
    layouts = {"uint8": codes, "signed": signed.view(np.uint8), "int4": as_int4(codes)}
    of_columns = {"uint8": jnp.asarray(codes).T}
    if columns % 2 == 0:
        of_columns["int4"] = layouts["int4"].T
    for rows in (1, 2, 3, 5, 8, 17, 64):
        for start in (0, len(x) - rows):
            part = slice(start, start + rows)
            for name, given in layouts.items():
                got = sums(x[part], given, scales)
                np.testing.assert_array_equal(got, wanted[part], f"{rows}, {name}")
            for name, given in of_columns.items():
                got = sums_of_columns(x[part], given, scales.T)
                np.testing.assert_array_equal(got, wanted[part], f"{rows}, {name}.T")


def test_rows_that_leave_the_cache_have_equal_bits():
    x, codes, scales = operands(33, 8192, 64, rows=133)
    wanted = np.concatenate([sums(row[None], codes, scales) for row in x])
    np.testing.assert_array_equal(sums(x, codes, scales), wanted)


def test_columns_have_equal_bits_wherever_they_are():
    x, codes, scales = operands(33, 128, 32, rows=9)
    wanted = sums(x, codes, scales)
    for start, stop in ((0, 16), (0, 17), (1, 33), (13, 30)):
        got = sums(x, codes[start:stop], scales[start:stop])
        np.testing.assert_array_equal(got, wanted[:, start:stop])


def test_threads_have_equal_bits():
    """They begin in another order each time."""
    x, codes, scales = operands(1029, 512, 64, rows=37)
    wanted = sums(x, codes[:32], scales[:32])
    last = sums(x, codes[-32:], scales[-32:])
    for _ in range(20):
        got = sums(x, codes, scales)
        np.testing.assert_array_equal(got[:, :32], wanted)
        np.testing.assert_array_equal(got[:, -32:], last)


@pytest.mark.parametrize(("columns", "products", "of_tile"), SIZES)
def test_avx2_has_equal_bits(columns, products, of_tile, by_avx2):
    """On a processor with AVX-512, these are other instructions in another order."""
    x, codes, scales = operands(columns, products, of_tile)
    layouts = codes, as_int4(codes)
    numbers = 1, 3, 8, 17, 64
    calls = [(x[:rows], given) for rows in numbers for given in layouts]
    wanted = [sums(part, given, scales) for part, given in calls]
    by_avx2()
    for (part, given), one in zip(calls, wanted, strict=True):
        np.testing.assert_array_equal(sums(part, given, scales), one)
        assert f"{NAME}_8_" in sums.lower(part, given, scales).as_text()


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("is_avx2", [False, True])
def test_what_is_not_finite_or_zero_is_as_ieee_has_it(rows, is_avx2, by_avx2):
    if is_avx2:
        by_avx2()
    x, codes, scales = operands(17, 128, 64, rows)
    codes[:, 3], codes[0, 5] = 15, 7  # The largest, and zero.
    scales = abs(scales)
    for value, wanted in ((jnp.nan, jnp.nan), (jnp.inf, jnp.inf), (-jnp.inf, -jnp.inf)):
        x[-1, 3] = value
        got = sums(x, codes, scales)
        np.testing.assert_array_equal(got[-1], np.full(17, wanted))
        assert np.isfinite(got[:-1]).all()
    x[-1, 3], x[-1, 5] = 0, jnp.inf
    assert np.isnan(sums(x, codes, scales)[-1, 0])
    zeros = sums(np.zeros_like(x), codes, scales)
    np.testing.assert_array_equal(zeros, np.zeros((rows, 17)))
    assert not np.signbit(zeros).any()


@pytest.mark.parametrize("is_avx2", [False, True])
def test_subnormals_are_what_they_are_to_xla(is_avx2, by_avx2):
    """XLA's threads take them for zero, in every number of rows and columns."""
    if is_avx2:
        by_avx2()
    for rows, columns in ((1, 16), (1, 2048), (4, 16), (64, 2048)):
        codes, scales = np.full((columns, 512), 15, np.uint8), np.ones((columns, 1))
        x = np.full((rows, 512), np.float32(2.0**-140))
        got = sums(x, codes, scales.astype(np.float32))
        wanted = jax.jit(jnp.dot)(x, np.ones((512, columns), np.float32))
        integers = (lax.bitcast_convert_type(one, jnp.int32) for one in (got, wanted))
        np.testing.assert_array_equal(*integers)


@pytest.mark.parametrize("dtype", ["int4", "uint8"])
@pytest.mark.parametrize("rows", [1, 5])
def test_codes_are_packed_for_serving(dtype, rows):
    x, codes, scales = operands(33, 96, 32, rows)
    given = as_int4(codes) if dtype == "int4" else jnp.asarray(codes)
    params = {"codes": given, "scales": jnp.asarray(scales)}

    def serve(params, x):
        return table_products.sums(x, params["codes"], params["scales"], NF4)

    program = aqtlite.compile_serving(serve, params, x)
    types = [
        (one.shape, one.dtype) for one in jax.tree.leaves(program.compiled.in_avals)
    ]
    assert ((3, 16 * 96 // 2), jnp.uint8) in types
    assert ((3, 3, 16), jnp.float32) in types
    assert f"_{Layout.PANELS:d}_1_" in program.compiled.as_text()
    np.testing.assert_array_equal(program(x), sums(x, codes, scales))


@pytest.mark.parametrize("dtype", ["int4", "uint8"])
@pytest.mark.parametrize("are_scales_known", [True, False])
def test_codes_of_columns_are_packed_for_serving(dtype, are_scales_known):
    x, codes, scales = operands(34, 96, 32, 5)
    given = as_int4(codes) if dtype == "int4" else jnp.asarray(codes)
    params = {"codes": given.T, "scales": jnp.asarray(scales).T}

    def serve(params, x):
        scales = params["scales"]
        if not are_scales_known:
            scales = scales * jnp.where(jnp.isnan(x[0, 0]), 2, 1)
        return table_products.sums_of_columns(x, params["codes"], scales, NF4)

    program = aqtlite.compile_serving(serve, params, x)
    types = [
        (one.shape, one.dtype) for one in jax.tree.leaves(program.compiled.in_avals)
    ]
    assert ((3, 16 * 96 // 2), jnp.uint8) in types
    assert (((3, 3, 16), jnp.float32) in types) == are_scales_known
    np.testing.assert_array_equal(program(x), sums(x, codes, scales))


def test_derivatives_and_maps_are_those_of_the_plain_form():
    x, codes, scales = operands(16, 64, 32, 6)
    weights = weights_of(codes, scales, NF4)
    of_x, of_scales = jax.jit(
        jax.grad(lambda x, scales: sums(x, codes, scales).sum(), (0, 1))
    )(x, scales)
    np.testing.assert_allclose(of_x, np.tile(weights.sum(0), (6, 1)), 1e-5, 1e-5)
    tiles = np.asarray(NF4)[codes] * x.astype(float).sum(0)
    wanted = tiles.reshape(16, 2, 32).sum(2)
    np.testing.assert_allclose(of_scales, wanted, 1e-4, 1e-4)
    mapped = jax.jit(jax.vmap(lambda x: sums(x, codes, scales)))(x.reshape(3, 2, 64))
    np.testing.assert_array_equal(mapped.reshape(6, 16), sums(x, codes, scales))


@pytest.mark.parametrize(
    ("rows", "columns", "of_tile", "wanted"),
    [
        (1, 16, 16, True),
        (256, 1000, 1024, True),
        (0, 16, 16, False),
        (257, 16, 16, False),
        (1, 15, 16, False),
        (1, 16, 8, False),
        (1, 16, 40, False),
        (1, 16, 0, False),
    ],
)
def test_it_takes_whole_panels_and_runs_of_few_rows(rows, columns, of_tile, wanted):
    is_read = table_products.reads(columns, of_tile)
    assert (is_read and table_products.pays(rows)) == wanted


def test_names_are_short_and_tell_tables_apart():
    one, other = (Kernel(t, 16, 64, Layout.PAIRS, False, True) for t in (NF4, OTHER))
    assert one.name != other.name and len(one.name) < 48
    assert one.name == Kernel(NF4, 16, 64, Layout.PAIRS, False, True).name
