"""Dots of int4 that lie two in a byte: equal sums, on both kinds of processor."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite.lowering.forms import packed_dot, pairs, processor
from tests.lowering.dots import integer_dot

pytestmark = pytest.mark.code("quick")

LAST_AXES = ((1,), (1,)), ((), ())


@pytest.fixture(params=[False, True], ids=["int8", "uint8"])
def unsigned(request, monkeypatch):
    """Both kinds of processor, whichever this is."""
    monkeypatch.setattr(processor, "has_unsigned_dots", lambda: request.param)
    monkeypatch.setattr(processor, "multiplies_unsigned", lambda rows: request.param)


@pytest.fixture
def small(monkeypatch):
    """Blocks of three columns of ten, and no weights that are too few."""
    monkeypatch.setattr(pairs, "_FEW_WEIGHTS", 31)
    monkeypatch.setattr(pairs, "_FEW_PACKED", 31)
    monkeypatch.setattr(pairs, "_BLOCK", 30)
    monkeypatch.setattr(pairs, "_LARGE_BLOCK", 45)
    monkeypatch.setattr(pairs, "_FEW_ROWS", 4)


def integers(shape, dtype=jnp.int8, seed=0):
    info = jnp.iinfo(dtype)
    values = np.random.default_rng(seed).integers(info.min, info.max + 1, shape)
    return jnp.asarray(values, dtype)


def exact(lhs, rhs, dims=LAST_AXES):
    left, right = (x.astype(jnp.int32) for x in (lhs, rhs))
    return jax.lax.dot_general(left, right, dims)


@pytest.mark.usefixtures("unsigned", "small")
@pytest.mark.parametrize(
    ("lhs", "rhs"),
    [
        pytest.param((1, 10), (7, 10), id="one row, blocks that overlap"),
        pytest.param((3, 10), (6, 10), id="few rows"),
        pytest.param((2, 5, 10), (2, 4, 10), id="rows and columns of two axes"),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int4])
def test_sums_are_equal(lhs, rhs, dtype):
    dims = ((len(lhs) - 1,), (len(rhs) - 1,)), ((), ())
    operands = integers(lhs, dtype), integers(rhs, jnp.int4, seed=1)
    assert pairs.has_fast_form(*operands, dims)
    got = jax.jit(lambda *x: integer_dot(*x, dims))(*operands)
    np.testing.assert_array_equal(got, exact(*operands, dims))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("lhs", "rhs", "dims"),
    [
        ((3, 9), (5, 9), LAST_AXES),  # Half a pair.
        ((3, 8), (8, 5), (((1,), (0,)), ((), ()))),  # Pairs of columns.
        ((2, 3, 8), (2, 5, 8), (((2,), (2,)), ((0,), (0,)))),
        ((600, 8), (5, 8), LAST_AXES),  # Widening is not what takes time.
        ((0, 8), (5, 8), LAST_AXES),
        ((3, 6), (5, 6), LAST_AXES),  # Few weights.
    ],
)
def test_other_int4_is_widened(lhs, rhs, dims):
    operands = jnp.ones(lhs, jnp.int8), jnp.ones(rhs, jnp.int4)
    assert not pairs.has_fast_form(*operands, dims)


@pytest.mark.usefixtures("small")
def test_a_program_reads_bytes_and_contracts_halves_apart():
    lhs, rhs = jnp.ones((3, 8), jnp.int8), jnp.ones((5, 8), jnp.int4)
    text = jax.jit(lambda *x: integer_dot(*x, LAST_AXES)).lower(lhs, rhs).as_text()
    dots = re.findall(r"dot_general.*\((tensor<\S+>), (tensor<\S+>)\)", text)
    assert len(dots) == 2
    assert all("x4xi8>" in one or "x4xui8>" in one for pair in dots for one in pair)


@pytest.mark.usefixtures("unsigned", "small")
@pytest.mark.parametrize(
    ("x", "weights", "dims", "known"),
    [
        pytest.param((1, 9), (7, 9), LAST_AXES, 1, id="half a pair"),
        pytest.param((5, 10), (10, 7), (((1,), (0,)), ((), ())), 1, id="KN"),
        pytest.param(
            (2, 3, 4, 2), (4, 2, 6), (((2, 3), (0, 1)), ((), ())), 1, id="heads"
        ),
        pytest.param((7, 10), (5, 10), LAST_AXES, 0, id="weights left"),
    ],
)
def test_packed_weights_stay_in_half_a_byte(x, weights, dims, known):
    args = [integers(x), integers(weights, jnp.int4, seed=1)]
    if known == 0:
        args = [integers(x, jnp.int4), integers(weights, seed=1)]
    expected = exact(*args, dims)
    types = [jax.ShapeDtypeStruct(arg.shape, arg.dtype) for arg in args]
    packing = packed_dot.of_dot(*types, dims, frozenset({known}))
    packed = jax.jit(packing.pack)(args)
    assert sum(part.nbytes for part in packed) <= -(-args[known].size // 2) + 7
    args[known] = None
    got = jax.jit(lambda packed, args: packing.run(packed, args))(packed, args)
    np.testing.assert_array_equal(got, expected)
