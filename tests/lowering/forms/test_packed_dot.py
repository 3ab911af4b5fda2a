"""Dots of packed weights: equal sums, packed where that is faster."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from aqtlite.lowering import packing_of
from aqtlite.lowering.forms import packed_dot, panel_products, processor

pytestmark = pytest.mark.code("quick")

NK = ((1,), (1,)), ((), ())


@pytest.fixture(autouse=True)
def without_kernel(monkeypatch):
    """The forms of XLA; the kernel has tests of its own (`test_panel_products`)."""
    monkeypatch.setattr(panel_products, "runs_here", lambda: False)


@pytest.fixture(autouse=True)
def unsigned(monkeypatch):
    """A processor that multiplies uint8 by int8."""
    monkeypatch.setattr(processor, "has_unsigned_dots", lambda: True)


@pytest.fixture
def any_size(monkeypatch):
    """No size is too small."""
    monkeypatch.setattr(packed_dot, "_worthwhile", lambda rows: 0)


def integers(shape, seed=0):
    values = np.random.default_rng(seed).integers(-128, 128, shape)
    return jnp.asarray(values, jnp.int8)


def dot(lhs, rhs, dims):
    return lax.dot_general(lhs, rhs, dims, preferred_element_type=jnp.int32)


def packing(lhs, rhs, dims, known=1):
    closed = jax.make_jaxpr(lambda lhs, rhs: dot(lhs, rhs, dims))(lhs, rhs)
    return packing_of(closed.jaxpr.eqns[0], frozenset({known}))


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("is_old", [True, False])
@pytest.mark.parametrize(
    ("x", "weights", "dims", "known"),
    [
        pytest.param((1, 40), (24, 40), NK, 1, id="one row"),
        pytest.param((3, 40), (40, 24), (((1,), (0,)), ((), ())), 1, id="KN"),
        pytest.param((130, 40), (24, 40), NK, 1, id="many rows"),
        pytest.param((2, 5, 40), (4, 8, 40), (((2,), (2,)), ((), ())), 1, id="heads"),
        pytest.param(
            (2, 80, 4, 8), (4, 8, 24), (((2, 3), (0, 1)), ((), ())), 1, id="of heads"
        ),
        pytest.param((24, 40), (5, 40), NK, 0, id="weights left"),
        pytest.param((24, 40), (70, 40), NK, 0, id="weights left, many rows"),
        pytest.param((40,), (24, 40), (((0,), (1,)), ((), ())), 1, id="vector"),
        pytest.param((5, 40), (40,), (((1,), (0,)), ((), ())), 1, id="one column"),
    ],
)
def test_sums_are_equal(x, weights, dims, known, is_old, monkeypatch):
    monkeypatch.setattr(processor, "HAS_OLD_KERNELS", is_old)
    args = integers(x), integers(weights, seed=1)
    one = packing(*args, dims, known)
    if one is None:
        assert not is_old  # int8 by int8 is as fast there, for many rows.
        return
    packed = jax.jit(one.pack)(args)
    unread = [None if i == known else arg for i, arg in enumerate(args)]
    got = jax.jit(lambda packed, args: one.run(packed, args))(packed, unread)
    assert (got == dot(*args, dims)).all()
    assert got.shape == jax.eval_shape(lambda *args: dot(*args, dims), *args).shape


@pytest.mark.parametrize("is_old", [True, False])
def test_small_weights_are_packed_for_few_rows_by_new_kernels(is_old, monkeypatch):
    monkeypatch.setattr(processor, "HAS_OLD_KERNELS", is_old)

    def is_packed(rows, size):
        x, weights = (
            jax.ShapeDtypeStruct((n, 512), jnp.int8) for n in (rows, size // 512)
        )
        return packing(x, weights, NK) is not None

    assert is_packed(1, 2**18) == is_packed(8, 2**18) == (not is_old)
    assert not is_packed(9, 2**18)
    assert not is_packed(1, 2**17)
    assert not is_packed(32, 2**19)
    assert is_packed(32, 2**20)


@pytest.mark.usefixtures("any_size")
def test_weights_are_raised_for_few_rows_only():
    def is_raised(rows, products):
        x, weights = (
            jax.ShapeDtypeStruct((n, products), jnp.int8) for n in (rows, 512)
        )
        one = packing(x, weights, NK)
        return (
            one is not None
            and jax.eval_shape(one.pack, (x, weights))[0].dtype == "uint8"
        )

    assert is_raised(1, 1024)
    assert is_raised(32, 1024)
    assert not is_raised(33, 1024)
    assert is_raised(128, 2048)
    assert not is_raised(129, 2048)


@pytest.mark.usefixtures("any_size")
def test_what_does_not_pay_is_not_packed(monkeypatch):
    x, weights = integers((2, 8)), integers((4, 8))
    assert packing(x, weights, NK) is not None
    batched = ((2,), (2,)), ((0,), (0,))
    assert packing(x[None], weights[None], batched) is None
    assert packing(x.T, weights, (((0,), (1,)), ((), ()))) is None
    assert packing(x.astype(jnp.float32), weights.astype(jnp.float32), NK) is None
    assert packing(x.astype(jnp.int4), weights.astype(jnp.int4), NK) is None
    closed = jax.make_jaxpr(lambda x, w: dot(x, w, NK))(x, weights)
    assert packing_of(closed.jaxpr.eqns[0], frozenset({0, 1})) is None
    monkeypatch.setattr(packed_dot, "_worthwhile", lambda rows: 33)
    assert packing(x, weights, NK) is None
    monkeypatch.setattr(packed_dot, "_worthwhile", lambda rows: 0)
    monkeypatch.setattr(processor, "has_unsigned_dots", lambda: False)
    assert packing(x, weights, NK) is None
