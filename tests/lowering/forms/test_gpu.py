"""What GPUs are given: the programs are lowered for them, and run here."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import config, lowering, numerics
from tests.lowering.dots import contract, integer_dot, mixed_dot

# Sums of integers, and programs that are not compiled.
pytestmark = pytest.mark.code("quick")

MATMUL = (((1,), (0,)), ((), ()))


def lowered(function, *args, platform="cuda"):
    traced = jax.jit(function).trace(*args)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def integers(shape, dtype=np.int8):
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(-7, 8, shape, np.int8)).astype(dtype)


def narrow_dot(lhs, rhs, dims):
    left, right = (x.astype(jnp.float8_e4m3fn) for x in (lhs, rhs))
    return contract(lowering.Narrow(), left, right, dims)


@pytest.mark.parametrize("dot", [integer_dot, narrow_dot])
@pytest.mark.parametrize(
    "lhs, rhs, dims",
    [
        ((4, 32), (32, 16), MATMUL),
        ((32, 4), (32, 16), (((0,), (0,)), ((), ()))),
        ((2, 32, 4), (2, 32, 16), (((1,), (1,)), ((0,), (0,)))),
    ],
    ids=["forward", "gradient of weights", "batched"],
)
def test_matrices_have_their_contracting_axis_last(dot, lhs, rhs, dims):
    lhs, rhs = integers(lhs), integers(rhs)
    program = lowered(lambda *xs: dot(*xs, dims), lhs, rhs)
    (line,) = (line for line in program.splitlines() if "stablehlo.dot" in line)
    last = lhs.ndim - 1
    assert f"contracting_dims = [{last}] x [{last}]" in line
    # XLA would fold the transpositions into the product.
    assert "@LayoutConstraint" in program
    if dot is integer_dot:  # Nor does it transpose the sums by themselves.
        after = program[program.index(line) :]
        assert re.search(r"@LayoutConstraint.*xi32>", after)
    assert "stablehlo.optimization_barrier" in program


@pytest.mark.parametrize("dot", [integer_dot, narrow_dot])
@pytest.mark.parametrize("rows, columns", [(1, 16), (4, 1)])
def test_products_with_vectors_stay_as_they_are(dot, rows, columns):
    lhs, rhs = integers((rows, 32)), integers((32, columns))
    program = lowered(lambda *xs: dot(*xs, MATMUL), lhs, rhs)
    assert "stablehlo.transpose" not in program


@pytest.mark.parametrize("dot", [integer_dot, narrow_dot])
def test_exported_programs_have_no_layouts(dot):
    lhs, rhs = integers((4, 32)), integers((32, 16))
    function = jax.jit(lambda *xs: dot(*xs, MATMUL))
    exported = jax.export.export(function, platforms=("cuda",))(lhs, rhs)
    assert "custom_call" not in exported.mlir_module()


def test_integers_are_not_narrowed_from_the_bits_of_floats():
    """XLA:GPU makes -1 of them."""
    grid = config.Tensor(numerics=numerics.IntSymmetric(bits=8))
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32)

    def program(platform):
        quantize = lambda x: aqtlite.quantize(x, grid, 1).qvalue  # noqa: E731
        return lowered(quantize, x, platform=platform)

    assert "round_nearest_even" in program("cuda")
    assert "bitcast_convert" not in program("cuda")
    assert "round_nearest_even" not in program("cpu")


def test_int4_are_written_in_the_order_in_which_they_are_read():
    weights = lowering.transposed(integers((6, 4), jnp.int4), (1, 0))
    assert weights.dtype == jnp.int4
    np.testing.assert_array_equal(
        weights.astype(jnp.int8), integers((6, 4)).transpose(1, 0)
    )
    program = lowered(
        lambda x: lowering.transposed(x, (1, 0)), integers((6, 4), jnp.int4)
    )
    assert re.findall(r"stablehlo.transpose .*-> tensor<4x6x(i\d)>", program) == ["i8"]
    # The floats of a layer beside int4 weights.
    x = jnp.ones((3, 6))
    mixed = lowered(
        lambda x, w: mixed_dot(x, w, MATMUL, out_dtype=np.dtype("float32")),
        *(x, integers((6, 4), jnp.int4)),
    )
    assert re.search(r"@LayoutConstraint.*tensor<6x4xi4>", mixed)


BFLOAT16 = np.dtype(jnp.bfloat16)

ROUNDED = {
    "fp8": (lowering.Narrow, jnp.float8_e4m3fn, jnp.float8_e4m3fn),
    "weight-only": (functools.partial(lowering.Mixed, BFLOAT16), jnp.bfloat16, np.int8),
    "weight-only int4": (
        functools.partial(lowering.Mixed, BFLOAT16),
        *(jnp.bfloat16, jnp.int4),
    ),
    "integers in float": (
        functools.partial(lowering.IntegersInFloat, BFLOAT16),
        *(np.int8, np.int8),
    ),
    "float": (lowering.Floats, jnp.bfloat16, jnp.bfloat16),
}


@pytest.mark.parametrize("dims", [MATMUL, (((0,), (0,)), ((), ()))])
@pytest.mark.parametrize("kind, left, right", ROUNDED.values(), ids=ROUNDED)
def test_products_round_their_sums_to_bfloat16(kind, left, right, dims):
    """A conversion behind them, XLA:GPU would drop."""
    lhs, rhs = integers((32, 32), left), integers((32, 16), right)
    rounded = functools.partial(contract, kind(accumulator=BFLOAT16), dims=dims)
    assert jax.eval_shape(rounded, lhs, rhs).dtype == BFLOAT16

    def dtype_of_product(platform):
        program = lowered(rounded, lhs, rhs, platform=platform)
        (line,) = re.findall(r"stablehlo.dot_general .*", program)
        return re.search(r"-> tensor<[\dx]*(\w+)>", line)[1]

    assert dtype_of_product("cuda") == "bf16"
    assert dtype_of_product("tpu") == "f32"
    want = contract(kind(), lhs, rhs, dims).astype(BFLOAT16)
    np.testing.assert_array_equal(rounded(lhs, rhs), want)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("kind, left, right", ROUNDED.values(), ids=ROUNDED)
def test_other_platforms_round_the_result(kind, left, right, platform):
    """Rounded earlier, before a transposition, CPUs give other bits."""
    lhs, rhs = integers((4, 8, 32), left), integers((4, 8, 16), right)
    dims, order = (((0, 1), (0, 1)), ((), ())), (1, 0)

    def program(accumulator):
        dot = lambda x, y: contract(  # noqa: E731
            kind(accumulator=accumulator), x, y, dims, order
        ).astype(BFLOAT16)
        return lowered(dot, lhs, rhs, platform=platform)

    assert program(BFLOAT16) == program(None)


@pytest.mark.parametrize(
    "dtype, accumulator",
    [(jnp.float16, BFLOAT16), (jnp.float32, BFLOAT16), (jnp.bfloat16, "float32")],
)
def test_other_products_are_rounded_after_their_sums(dtype, accumulator):
    """cuBLASLt has none of float16 to bfloat16, and float32 would be rounded first."""
    x = integers((16, 16), dtype)
    kind = lowering.Floats(accumulator=np.dtype(accumulator))
    program = lowered(lambda x: contract(kind, x, x, MATMUL), x)
    assert re.search(r"stablehlo.dot_general .*-> tensor<16x16xf32>", program)


def test_rounded_sums_of_integers_may_be_fused_into_the_product():
    lhs, rhs = integers((32, 32)), integers((32, 16))
    rounded = lambda x, y: contract(  # noqa: E731
        lowering.Integers(BFLOAT16), x, y, MATMUL
    )
    after = lowered(rounded, lhs, rhs).partition("stablehlo.dot_general")[2]
    # XLA drops a conversion alone, and keeps this.
    assert "stablehlo.reduce_precision" in after
    assert "stablehlo.optimization_barrier" not in after
    exact = lowered(lambda x, y: integer_dot(x, y, MATMUL), lhs, rhs)
    after = exact.partition("stablehlo.dot_general")[2]
    assert "stablehlo.optimization_barrier" in after
    want = integer_dot(lhs, rhs, MATMUL).astype(BFLOAT16)
    np.testing.assert_array_equal(rounded(lhs, rhs), want)


@pytest.mark.parametrize("preset", [config.fp8, config.weight_only])
def test_an_accumulator_reaches_the_products_of_a_training_step(preset):
    cfg = config.update(preset(), {"*.dg_accumulator_dtype": jnp.bfloat16})
    dot_general = aqtlite.make_dot_general(cfg)
    x, w = integers((32, 32), jnp.bfloat16), integers((32, 16), jnp.bfloat16)

    def loss(x, w):
        out = dot_general(x, w, MATMUL).astype(jnp.bfloat16)
        return (out.astype(jnp.float32) ** 2).sum()

    program = lowered(jax.grad(loss, (0, 1)), x, w)
    products = re.findall(r"stablehlo.dot_general .*-> tensor<\d+x\d+x(\w+)>", program)
    assert products == ["bf16"] * 3
