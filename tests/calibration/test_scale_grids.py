"""Scales of a dtype, against ml_dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import aqtlite
from aqtlite import config, numerics
from aqtlite.calibration import scale_grids

pytestmark = pytest.mark.code("quick")

INT8 = numerics.IntSymmetric(bits=8)
E2M1 = numerics.Float(exponent_bits=2, mantissa_bits=1)


def tensor_of(dtype, grid=INT8, **fields):
    if dtype in scale_grids.RELATIVE_DTYPES:
        fields["scale_shared_axes"] = "per_tensor"
    return config.Tensor(numerics=grid, scale_dtype=dtype, **fields)


def scales(x, dtype, grid=INT8, **fields):
    tensor = tensor_of(dtype, grid, **fields)
    return np.asarray(aqtlite.quantize(x, tensor, 1).scale)


def rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 5)) * np.exp(6 * rng.normal(size=(64, 1)))
    return x.astype(np.float32)


@pytest.mark.parametrize("dtype", scale_grids.DTYPES)
def test_is_on_the_grid(dtype):
    found = scales(rows(), dtype).ravel()
    if dtype in ("bfloat16", "float8_e8m0fnu"):
        np.testing.assert_array_equal(found.astype(dtype).astype(np.float32), found)
        return
    largest = float(jnp.finfo(dtype).max)
    values = found / (found.max() / np.float32(largest))
    np.testing.assert_allclose(values.astype(dtype).astype(np.float32), values, 1e-6)


def test_bfloat16_is_rounded_up():
    plain, found = scales(rows(), None), scales(rows(), "bfloat16")
    below = np.nextafter(found.astype(ml_dtypes.bfloat16), ml_dtypes.bfloat16(0))
    assert (found >= plain).all() and (below.astype(np.float32) < plain).all()


@pytest.mark.parametrize("grid", [INT8, E2M1, numerics.Float.from_dtype("float8_e5m2")])
def test_microscaling_specification(grid):
    """``2^(floor(log2(max |x|)) - emax)``, arXiv:2310.10537, section 6.3."""
    x = rows()
    exponent = np.floor(np.log2(np.abs(x).max(1, keepdims=True).astype(np.float64)))
    emax = np.floor(np.log2(grid.bound))
    wanted = 2.0 ** (exponent - emax)
    np.testing.assert_array_equal(scales(x, "float8_e8m0fnu", grid), wanted * grid.unit)


def test_power_of_two_above():
    found = scales(rows(), "float8_e8m0fnu", po2_scale=True)
    wanted = np.exp2(np.ceil(np.log2(scales(rows(), None).astype(np.float64))))
    np.testing.assert_array_equal(found, wanted)


def test_e4m3_of_one_number():
    """As in NVFP4: float8 scales, and one float32 number by which all are scaled."""
    x = rows()
    plain = np.abs(x).max(1, keepdims=True) / np.float32(6)
    whole = plain.max() / np.float32(448)
    codes = (plain / whole).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    codes = np.maximum(codes, 2.0**-9)
    np.testing.assert_allclose(scales(x, "float8_e4m3fn", E2M1), codes * whole, 1e-6)


def test_a_number_for_each_row():
    """Scales of the blocks of a row depend on that row alone."""
    x = rows().reshape(16, 20)
    blocks = config.Blocks(size=5)
    tensor = config.Tensor(numerics=E2M1, scale_dtype="float8_e4m3fn", blocks=blocks)
    each = [np.asarray(aqtlite.quantize(row[None], tensor, 1).scale) for row in x]
    together = np.asarray(aqtlite.quantize(x, tensor, 1).scale)
    np.testing.assert_array_equal(together, np.concatenate(each))
    shared = tensor_of("float8_e4m3fn", E2M1, blocks=blocks)
    assert (together != np.asarray(aqtlite.quantize(x, shared, 1).scale)).any()


@pytest.mark.parametrize("shared", [None, (1,)])
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_factored(dtype, stochastic, shared):
    """Also with rows of zeros, rows that are no numbers, and tiny blocks."""
    x = rows().reshape(16, 20)
    x[3], x[5, :5], x[7, :5], x[8], x[9, 5:10] = 0, 0, np.nan, 1e-36, 1e-30
    grid = numerics.Float(
        exponent_bits=2, mantissa_bits=1, stochastic_rounding=stochastic
    )
    tensor = config.Tensor(
        numerics=grid,
        scale_dtype=dtype,
        blocks=config.Blocks(size=5),
        scale_shared_axes="per_tensor" if shared is None else None,
    )
    scale = aqtlite.quantize(jnp.asarray(x), tensor, 1).scale
    values, number = scale_grids.factored(scale, jnp.dtype(dtype), shared)
    assert values.dtype == dtype
    assert number.shape == ((1, 1) if shared is None else (16, 1))
    product = np.asarray(values, np.float32) * np.asarray(number)
    np.testing.assert_allclose(product, scale, rtol=5e-7)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_factored_parts_of_an_array(dtype):
    """Of a shard or a slice, in which no scale need be the largest value."""
    bits = np.arange(1, 127, dtype=np.uint8)
    values = bits.view(dtype).astype(np.float32)
    values = values[np.isfinite(values)]
    rng = np.random.default_rng(0)
    for count in (1, 2, 5, 40):
        parts = rng.choice(values, (64, count)) * rng.uniform(1e-9, 1e9, (64, 1))
        parts = parts.astype(np.float32)
        found, number = scale_grids.factored(jnp.asarray(parts), np.dtype(dtype), (1,))
        product = np.asarray(found, np.float32) * np.asarray(number)
        np.testing.assert_allclose(product, parts, rtol=5e-7)


@pytest.mark.parametrize("dtype", scale_grids.DTYPES)
def test_rows_that_are_no_numbers(dtype):
    x = np.array([[0, 0], [np.nan, 1], [np.inf, 1], [1e-40, 0], [3, 2]], np.float32)
    found = scales(x, dtype)[:, 0]
    # A row of zeros has the largest scale of those that share a number with it.
    empty = found[4] if dtype in scale_grids.RELATIVE_DTYPES else 1
    assert found[0] == found[3] == empty
    assert np.isnan(found[1]) and np.isnan(found[2])
    np.testing.assert_allclose(found[4], scales(x, None)[4, 0], rtol=1.0)


@pytest.mark.code("users")
@pytest.mark.parametrize("dtype", scale_grids.DTYPES)
def test_same_in_every_program(dtype):
    x = jnp.asarray(rows(), jnp.bfloat16)
    tensor = tensor_of(dtype, E2M1)
    alone = aqtlite.quantize(x, tensor, 1)
    fused = jax.jit(lambda x: aqtlite.quantize(x * 1.0, tensor, 1))(x)
    np.testing.assert_array_equal(alone.scale, fused.scale)
    np.testing.assert_array_equal(
        alone.qvalue.astype("float32"), fused.qvalue.astype("float32")
    )


def test_affine_range_is_not_cut():
    grid = numerics.IntAffine()
    tensor = config.Tensor(
        numerics=grid,
        calibration=aqtlite.calibration.MinMax(),
        scale_dtype="float8_e8m0fnu",
    )
    x = rows()
    q = aqtlite.quantize(x, tensor, 1)
    assert (np.abs(q.dequant() - x) <= q.scale / 2 * 1.0001).all()


@pytest.mark.parametrize("dtype", scale_grids.DTYPES)
def test_stochastic_rounding_clips_nothing(dtype):
    """Otherwise it would be biased; a scale below the exact one would clip."""
    x = rows()
    grid = numerics.Float(exponent_bits=2, mantissa_bits=1, stochastic_rounding=True)
    found = scales(x, dtype, grid)
    assert (found >= scales(x, None, grid) * (1 - 1e-6)).all()


def test_nearest_power_of_two():
    values = np.array([1, 1.414, 1.415, 1.999, 3e-30, 0.7071, 0.7072], np.float32)
    wanted = 2.0 ** np.round(np.log2(values.astype(np.float64)))
    np.testing.assert_array_equal(scale_grids.nearest_power_of_two(values), wanted)
