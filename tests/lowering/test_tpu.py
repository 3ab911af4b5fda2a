"""What TPUs are given: the programs are lowered for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite.lowering import Target, processor, tpu
from tests.lowering.dots import integer_dot
from tests.lowering.test_gpu import lowered

ROWS = (((0,), (0,)), ((), ()))


@pytest.fixture(autouse=True)
def of_v5e(monkeypatch):
    monkeypatch.setattr(processor, "tpu_reads_rows", lambda: True)


def program(lhs, rhs, dims=ROWS):
    shapes = (jax.ShapeDtypeStruct(shape, jnp.int8) for shape in (lhs, rhs))
    return lowered(lambda *xs: integer_dot(*xs, dims), *shapes, platform="tpu")


@pytest.mark.parametrize(
    "lhs, rhs, dims, axes",
    [
        ((1024, 8), (1024, 2048), ROWS, "[1] x [0]"),
        ((4, 512, 8), (4, 512, 2, 1024), (((0, 1),) * 2, ((), ())), "[1, 2] x [0, 1]"),
        ((2, 1024, 8), (2, 1024, 2048), (((1,),) * 2, ((0,),) * 2), "[2] x [1]"),
    ],
    ids=["matrices", "sequences", "batched"],
)
def test_lhs_is_written_by_rows_for_gradients_of_weights(lhs, rhs, dims, axes):
    found = program(lhs, rhs, dims)
    assert f"contracting_dims = {axes}" in found
    assert "@LayoutConstraint" in found


@pytest.mark.parametrize(
    "lhs, rhs", [((1000, 8), (1000, 2048)), ((1024, 8), (1024, 2000))]
)
def test_small_contractions_stay_as_they_are(lhs, rhs):
    found = program(lhs, rhs)
    assert "contracting_dims = [0] x [0]" in found
    assert "@LayoutConstraint" not in found


def test_forward_contractions_stay_as_they_are():
    forward = program((8, 1024), (1024, 2048), (((1,), (0,)), ((), ())))
    assert "@LayoutConstraint" not in forward


def test_other_tpus_take_the_plain_form(monkeypatch):
    monkeypatch.setattr(processor, "tpu_reads_rows", lambda: False)
    assert "@LayoutConstraint" not in program((1024, 8), (1024, 2048))


def test_exported_programs_have_no_layouts():
    shapes = (jax.ShapeDtypeStruct((1024, n), jnp.int8) for n in (8, 2048))
    dot = jax.jit(lambda *xs: integer_dot(*xs, ROWS))
    exported = jax.export.export(dot, platforms=("tpu",))(*shapes)
    assert "custom_call" not in exported.mlir_module()


def test_the_sums_are_those_of_the_plain_form():
    rng = np.random.default_rng(0)
    lhs = rng.integers(-127, 128, (2, 1024, 3), np.int8)
    rhs = rng.integers(-127, 128, (2, 1024, 2048), np.int8)
    dims = (((1,), (1,)), ((0,), (0,)))
    target = Target("tpu", partitions=1)
    found = jax.jit(lambda *xs: tpu.dot(*xs, dims, target))(lhs, rhs)
    np.testing.assert_array_equal(found, np.einsum("bki,bkj->bij", lhs, rhs, dtype=int))
