"""What TPUs are given: the programs are lowered for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import config
from aqtlite.lowering import Target
from aqtlite.lowering.dot import Dot
from aqtlite.lowering.forms import processor, tpu
from tests.lowering.dots import integer_dot
from tests.lowering.forms.test_gpu import lowered

# Sums of integers, and programs that are not compiled.
pytestmark = pytest.mark.code("quick")

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


COLUMN = (((1,), (0,)), ((), ()))


@pytest.mark.parametrize(
    "lhs, rhs, dims",
    [
        ((1, 512), (512, 512), COLUMN),
        ((1, 1, 512), (512, 4, 128), (((2,), (0,)), ((), ()))),
        ((512, 4, 128), (1, 512), (((0,), (1,)), ((), ()))),
        ((1, 1, 512), (4, 512, 128), (((2,), (1,)), ((), ()))),
    ],
    ids=["row", "token", "exchanged", "apart"],
)
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int4, jnp.bfloat16, jnp.float8_e4m3fn])
def test_a_row_by_a_large_matrix_is_padded(dtype, lhs, rhs, dims):
    def dot(*operands):
        return Dot(dims, len(lhs), len(rhs)).sums(*operands)

    given = (jax.ShapeDtypeStruct(shape, dtype) for shape in (lhs, rhs))
    found = lowered(dot, *given, platform="tpu")
    assert "stablehlo.pad" in found and "optimization_barrier" in found
    rng = np.random.default_rng(0)
    # XLA:CPU does not contract int4.
    of_cpus = jnp.int8 if dtype == jnp.int4 else dtype
    a, b = (
        jnp.asarray(rng.integers(-7, 8, shape, np.int8)).astype(of_cpus)
        for shape in (lhs, rhs)
    )
    target = Target("tpu", partitions=1)
    got = jax.jit(lambda *xs: tpu.dot(*xs, dims, target))(a, b)
    wanted = np.tensordot(*(np.asarray(x, np.int32) for x in (a, b)), axes=dims[0])
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("preset", [config.fp8, config.weight_only])
def test_a_row_of_a_layer_of_floats_is_padded(preset):
    dot = aqtlite.make_dot_general(preset())
    given = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 512), (512, 512))
    )
    found = lowered(lambda *xs: dot(*xs, COLUMN), *given, platform="tpu")
    (row,) = [line for line in found.splitlines() if "stablehlo.dot_general" in line]
    assert "tensor<8x512x" in row


@pytest.mark.parametrize(
    "rows, matrix",
    [(1, "512x512"), (64, "512x512"), (513, "8x64x512")],
)
def test_the_heads_of_stored_weights_are_merged_for_few_rows(rows, matrix):
    """They keep the layout in which they are stored."""
    dims = (((2,), (2,)), ((), ()))
    shapes = (rows, 1, 512), (8, 64, 512)
    given = (jax.ShapeDtypeStruct(shape, jnp.int8) for shape in shapes)
    found = lowered(Dot(dims, 3, 3).sums, *given, platform="tpu")
    (line,) = [line for line in found.splitlines() if "stablehlo.dot_general" in line]
    assert f", tensor<{matrix}xi8>)" in line
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-127, 128, shape, np.int8) for shape in shapes)
    target = Target("tpu", partitions=1)
    got = jax.jit(lambda *xs: tpu.dot(*xs, dims, target))(a, b)
    wanted = np.einsum("btk,hdk->bthd", a, b, dtype=np.int32)
    np.testing.assert_array_equal(got, wanted)


def test_a_row_of_a_gradient_of_fp8_is_padded():
    """Its operands are floats of different kinds."""
    kinds = jnp.float8_e5m2, jnp.float8_e4m3fn
    given = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in zip(((1, 512), (512, 512)), kinds, strict=True)
    )
    found = lowered(Dot(COLUMN, 2, 2).narrow, *given, platform="tpu")
    assert "stablehlo.pad" in found


@pytest.mark.parametrize(
    "lhs, rhs, dims, dtype",
    [
        ((2, 512), (512, 512), COLUMN, jnp.int8),
        ((1, 256), (256, 512), COLUMN, jnp.int8),
        ((1, 2**18), (2**18, 1), COLUMN, jnp.int8),
        ((4, 1, 512), (4, 512, 512), (((2,), (1,)), ((0,), (0,))), jnp.int8),
        ((1, 512), (512, 512), COLUMN, jnp.float32),
    ],
    ids=["rows", "small", "column", "batched", "float32"],
)
def test_other_rows_stay_as_they_are(lhs, rhs, dims, dtype):
    def dot(*operands):
        return Dot(dims, len(lhs), len(rhs)).sums(*operands)

    given = (jax.ShapeDtypeStruct(shape, dtype) for shape in (lhs, rhs))
    assert "stablehlo.pad" not in lowered(dot, *given, platform="tpu")
