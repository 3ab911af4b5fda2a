"""Floats by integers, on CPUs: digits in blocks of rows."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite.lowering import dot
from aqtlite.lowering.forms import processor
from tests.lowering.dots import mixed_dot

LAST_AXES = ((1,), (1,)), ((), ())
FLOAT32 = jnp.dtype("float32")


@pytest.fixture(params=[False, True], ids=["int8", "uint8"])
def unsigned(request, monkeypatch):
    """Both kinds of processor, whichever this is."""
    monkeypatch.setattr(processor, "multiplies_unsigned", lambda rows: request.param)


@pytest.fixture
def blocks(monkeypatch):
    """Blocks of four rows at most."""
    monkeypatch.setattr(dot, "_FEW_SUMS", 0)
    monkeypatch.setattr(dot, "_BLOCK_SUMS", 0)
    monkeypatch.setattr(dot, "_BLOCK_ROWS", 4)


def operands(rows, products=32, columns=6, bits=8, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, products)).astype(np.float32)
    largest = 2 ** (bits - 1) - 1
    w = rng.integers(-largest, largest + 1, (columns, products))
    return jnp.asarray(x), jnp.asarray(w, jnp.dtype(f"int{bits}"))


def dot_of(lhs, rhs, dims=LAST_AXES, order=None, dtype=FLOAT32):
    """Compiled anew: the forms depend on what fixtures replaced."""
    return jax.jit(lambda lhs, rhs: mixed_dot(lhs, rhs, dims, order, out_dtype=dtype))(
        lhs, rhs
    )


def check(got, x, w, digit_bits=22):
    """Within half a unit of the lowest digit for every product, and float32's own."""
    x, w = np.asarray(x, np.float64), np.asarray(w.astype(jnp.int8), np.float64)
    row = np.abs(x).max(1, keepdims=True)
    bound = 2.0**-digit_bits * row * np.abs(w).sum(1) + 2.0**-22 * np.abs(x @ w.T)
    assert (np.abs(np.asarray(got, np.float64) - x @ w.T) <= bound).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.usefixtures("unsigned")
def test_rows_alone_and_in_batches_of_any_size(bits, monkeypatch):
    x, w = operands(11, bits=bits)
    batch = dot_of(x, w)
    check(batch, x, w)
    for rows in (1, 3):
        np.testing.assert_array_equal(dot_of(x[:rows], w), batch[:rows])
    monkeypatch.setattr(dot, "_FEW_SUMS", 0)
    monkeypatch.setattr(dot, "_BLOCK_SUMS", 0)
    monkeypatch.setattr(dot, "_BLOCK_ROWS", 4)
    # Blocks of 4 rows, of which the last two overlap.
    np.testing.assert_array_equal(dot_of(x, w), batch)


@pytest.mark.usefixtures("blocks")
def test_blocks_of_several_axes_in_another_order():
    x, w = operands(10)
    expected = np.asarray(dot_of(x, w))
    lhs, rhs = x.reshape(2, 5, 4, 8), w.reshape(2, 3, 4, 8)
    dims = ((2, 3), (2, 3)), ((), ())
    got = dot_of(lhs, rhs, dims, order=(2, 0, 3, 1))
    expected = expected.reshape(2, 5, 2, 3).transpose(2, 0, 3, 1)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.usefixtures("blocks")
def test_blocks_are_a_loop_and_few_sums_are_not(monkeypatch):
    x, w = operands(10)

    def program():
        lowered = jax.jit(
            lambda x, w: mixed_dot(x, w, LAST_AXES, out_dtype=FLOAT32)
        ).lower(x, w)
        return lowered.as_text()

    assert "stablehlo.while" in program()
    monkeypatch.setattr(dot, "_FEW_SUMS", 2**21)
    assert "stablehlo.while" not in program()


@pytest.mark.usefixtures("blocks")
def test_two_digits_in_blocks():
    x, w = operands(10)
    half = x.astype(jnp.bfloat16)
    check(dot_of(half, w, dtype=half.dtype), half, w, digit_bits=14)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.usefixtures("blocks")
def test_what_is_not_finite_poisons_its_row_alone(bad, bits):
    x, w = operands(10, bits=bits)
    clean = np.asarray(dot_of(x, w))
    got = np.asarray(dot_of(x.at[6, 3].set(bad), w))
    assert not np.isfinite(got[6]).any()
    np.testing.assert_array_equal(np.delete(got, 6, 0), np.delete(clean, 6, 0))


@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_exports_of_symbolic_sizes_have_equal_bits(dtype):
    x, info = operands(16, products=500)[0], jnp.iinfo(dtype)
    rng = np.random.default_rng(0)
    w = rng.integers(info.min + 1, info.max, (64, 500)).astype(dtype)

    @jax.jit
    def dot(x, w):
        return mixed_dot(x, w, LAST_AXES, out_dtype=FLOAT32)

    (size,) = jax.export.symbolic_shape("k")
    shapes = (
        jax.ShapeDtypeStruct((rows, size), kind)
        for rows, kind in ((16, x.dtype), (64, w.dtype))
    )
    exported = jax.export.export(dot, platforms=["cpu"])(*shapes)
    np.testing.assert_array_equal(exported.call(x, w), dot(x, w))
