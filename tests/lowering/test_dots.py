import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from aqtlite import lowering
from aqtlite.lowering import digits
from aqtlite.lowering.forms import cpu, gpu, processor
from aqtlite.shapes import dimension_numbers as dn
from tests.common import DIMENSION_NUMBERS, MATMUL, normal
from tests.lowering.dots import contract, integer_dot, mixed_dot


def integers(shape, dtype, seed=0, extreme=False):
    low, high = (-7, 7) if dtype == "int4" else (-127, 127)
    if dtype == "int16":
        low, high = -255, 255
    rng = np.random.default_rng(seed)
    values = (
        rng.choice([low, high], shape)
        if extreme
        else rng.integers(low, high + 1, shape)
    )
    return jax.device_put(values.astype(jnp.dtype(dtype)))


def compiled_dot(lhs, rhs, dims):
    """`integer_dot` in one program, where eagerly each of its steps would be one."""
    return jax.jit(lambda lhs, rhs: integer_dot(lhs, rhs, dims))(lhs, rhs)


@pytest.fixture(params=[False, True], ids=["int8", "uint8"])
def unsigned(request, monkeypatch):
    """Both kinds of processor, whichever this is."""
    monkeypatch.setattr(processor, "multiplies_unsigned", lambda rows: request.param)
    return request.param


def exact(lhs, rhs, dims):
    """In float64, where all these sums are exact."""
    lhs, rhs = (np.asarray(x, np.float64) for x in (lhs, rhs))
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = dims
    axes = iter(range(lhs.ndim + rhs.ndim))
    lhs_axes = [next(axes) for _ in range(lhs.ndim)]
    rhs_axes = [next(axes) for _ in range(rhs.ndim)]
    for i, j in zip(
        lhs_contracting + lhs_batch, rhs_contracting + rhs_batch, strict=True
    ):
        rhs_axes[j] = lhs_axes[i]
    batch = [lhs_axes[i] for i in lhs_batch]
    summed = batch + [lhs_axes[i] for i in lhs_contracting]
    rest = [axis for axis in lhs_axes + rhs_axes if axis not in summed]
    return np.einsum(lhs, lhs_axes, rhs, rhs_axes, batch + rest, optimize=True)


@pytest.mark.parametrize("case", DIMENSION_NUMBERS)
@pytest.mark.usefixtures("unsigned")
def test_dimension_numbers(case):
    lhs_shape, rhs_shape, dims = DIMENSION_NUMBERS[case]
    lhs, rhs = integers(lhs_shape, "int8"), integers(rhs_shape, "int8", 1)
    got = compiled_dot(lhs, rhs, dims)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, exact(lhs, rhs, dims))


@pytest.mark.parametrize("column", [(2, 8), (2, 8, 1), (2, 1, 8)])
@pytest.mark.usefixtures("unsigned")
def test_a_transposed_operand_by_one_column(column):
    """A batch of them, with and without an axis of size one beside the column."""
    lhs, rhs = integers((2, 3, 8, 5), "int8"), integers(column, "int8", 1)
    dims = ((2,), (column.index(8),)), ((0,), (0,))
    got = compiled_dot(lhs, rhs, dims)
    np.testing.assert_array_equal(got, exact(lhs, rhs, dims))


@pytest.mark.parametrize(
    ("rows", "columns", "parts"),
    [
        (1, 640, 1),
        (1, 682, 2),
        (1, 683, 1),
        (1, 2000, 4),
        (1, 2622, 1),
        (1, 4000, 1),
        (8, 682, 2),
        (9, 682, 1),
    ],
)
@pytest.mark.parametrize("is_old", [True, False])
def test_few_rows_by_a_matrix_that_threads_would_divide(
    is_old, rows, columns, parts, monkeypatch
):
    """Old versions of JAX get it as a batch of parts."""
    monkeypatch.setattr(processor, "multiplies_unsigned", lambda rows: True)
    monkeypatch.setattr(processor, "HAS_OLD_KERNELS", is_old)
    lhs, rhs = integers((rows, 200), "int8"), integers((columns, 200), "int8", 1)
    dims = ((1,), (1,)), ((), ())
    (line,) = cpu_dots(lhs, rhs, dims)
    batch = f"{parts}x" if is_old and parts > 1 else ""
    shapes = (
        f"{batch}{rows + 1}x200xui8",
        f"{batch}{columns // (parts if batch else 1)}x200xi8",
    )
    assert "(tensor<{}>, tensor<{}>)".format(*shapes) in line
    got = compiled_dot(lhs, rhs, dims)
    np.testing.assert_array_equal(got, exact(lhs, rhs, dims))


@pytest.mark.parametrize("rows", [4, 100])
@pytest.mark.parametrize("is_old", [True, False])
def test_many_rows_are_unsigned_only_in_old_versions_of_jax(is_old, rows, monkeypatch):
    """XLA:CPU of JAX 0.12 has fast kernels for two signed operands."""
    monkeypatch.setattr(processor, "HAS_OLD_KERNELS", is_old)
    monkeypatch.setattr(processor, "has_unsigned_dots", lambda: True)
    lhs, rhs = integers((rows, 200), "int8"), integers((64, 200), "int8", 1)
    dims = ((1,), (1,)), ((), ())
    is_unsigned = rows == 4 or is_old
    lines = cpu_dots(lhs, rhs, dims)
    assert all(("x200xui8>" in line) == is_unsigned for line in lines)
    np.testing.assert_array_equal(compiled_dot(lhs, rhs, dims), exact(lhs, rhs, dims))


@pytest.mark.parametrize("rhs_dtype", ["int4", "int8", "int16"])
@pytest.mark.parametrize("lhs_dtype", ["int4", "int8", "int16"])
def test_storage_dtypes(lhs_dtype, rhs_dtype):
    lhs = integers((5, 64), lhs_dtype, extreme=True)
    rhs = integers((64, 3), rhs_dtype, 1, extreme=True)
    got = compiled_dot(lhs, rhs, MATMUL)
    np.testing.assert_array_equal(got, exact(lhs, rhs, MATMUL))


@st.composite
def contractions(draw):
    """Two operands' shapes, any dimension numbers, and an order of the result."""
    sizes = st.integers(0, 20)
    kinds = draw(st.lists(st.sampled_from("bclr"), min_size=1, max_size=5))
    named = [(kind, draw(sizes)) for kind in kinds]
    lhs = draw(
        st.permutations([i for i, (kind, _) in enumerate(named) if kind in "bcl"])
    )
    rhs = draw(
        st.permutations([i for i, (kind, _) in enumerate(named) if kind in "bcr"])
    )

    def axes(side, kind):
        return tuple(side.index(i) for i in range(len(named)) if named[i][0] == kind)

    dims = tuple((axes(lhs, kind), axes(rhs, kind)) for kind in "cb")
    order = tuple(draw(st.permutations(range(len(named) - kinds.count("c")))))
    return [named[i][1] for i in lhs], [named[i][1] for i in rhs], dims, order


@pytest.mark.code("quick")
@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(contractions(), st.sampled_from(["int4", "int8"]), st.booleans())
@pytest.mark.usefixtures("unsigned")
def test_any_contraction_in_any_order(contraction, dtype, permute):
    """Every path gives the integers of the plain contraction."""
    lhs_shape, rhs_shape, dims, order = contraction
    assume(dn.contraction_size(dims, lhs_shape) < 2**17)  # int32 holds the sums.
    lhs, rhs = integers(lhs_shape, dtype), integers(rhs_shape, "int8", 1)
    wanted = exact(lhs, rhs, dims)

    @jax.jit
    def run(lhs, rhs):
        got = integer_dot(lhs, rhs, dims, order if permute else None)
        # The forms of all platforms are plain JAX, which runs here too.
        lhs = lhs.astype(jnp.int8)
        target = lowering.Target("cuda", 1)
        return got, (cpu.dot(lhs, rhs, dims), gpu.dot(lhs, rhs, dims, target))

    got, forms = run(lhs, rhs)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, wanted.transpose(order) if permute else wanted)
    for form in forms:
        assert form.dtype == jnp.int32
        np.testing.assert_array_equal(form, wanted)


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_sizes_are_aligned_on_gpus(platform):
    def dot_lines(lhs, rhs, dims):
        dot = jax.jit(lambda lhs, rhs: integer_dot(lhs, rhs, dims))
        module = jax.export.export(dot, platforms=(platform,))(lhs, rhs).mlir_module()
        return [line for line in module.splitlines() if "stablehlo.dot" in line]

    (line,) = dot_lines(integers((5, 30), "int8"), integers((30, 17), "int8"), MATMUL)
    assert "(tensor<5x32xi8>, tensor<32x32xi8>)" in line
    dims = (((1, 2), (0, 1)), ((), ()))
    (line,) = dot_lines(integers((5, 6, 8), "int8"), integers((6, 8, 1), "int8"), dims)
    assert "(tensor<5x6x8xi8>, tensor<6x8x1xi8>)" in line
    (line,) = dot_lines(integers((5, 6, 9), "int8"), integers((6, 9, 48), "int8"), dims)
    assert "(tensor<5x6x16xi8>, tensor<6x16x48xi8>)" in line


@pytest.mark.parametrize("size", [131_071, 131_072, 300_001])
def test_long_contraction_does_not_overflow(size):
    """More products of +-128 than int32 holds are summed in pieces."""
    lhs = jnp.full((2, size), -127, jnp.int8)
    rhs = jnp.full((size, 1), -127, jnp.int8)
    got = np.asarray(compiled_dot(lhs, rhs, MATMUL), np.float64)
    np.testing.assert_allclose(got, 127.0**2 * size, rtol=2e-7)


def test_the_total_of_a_long_contraction_is_rounded_once():
    rng = np.random.default_rng(0)
    lhs = rng.integers(100, 128, (3, 300_001), np.int8)
    rhs = rng.integers(-127, 128, (300_001, 2), np.int8)
    rhs[:, 1] = rng.integers(100, 128, 300_001)
    got = compiled_dot(jnp.asarray(lhs), jnp.asarray(rhs), MATMUL)
    wanted = np.matmul(lhs, rhs, dtype=np.int64).astype(np.float32)
    np.testing.assert_array_equal(got, wanted)


def test_long_contraction_over_two_axes():
    lhs = jnp.full((1, 600, 500), 127, jnp.int8)
    rhs = jnp.full((500, 600, 2), 127, jnp.int8)
    dims = (((1, 2), (1, 0)), ((), ()))
    got = np.asarray(compiled_dot(lhs, rhs, dims), np.float64)
    np.testing.assert_allclose(got, np.full((1, 2), 127.0**2 * 300_000), rtol=2e-7)


@pytest.mark.code("quick")
@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_lowers_for_every_platform(dtype, monkeypatch):
    """From a CPU host, integers to the dot on each of them."""
    monkeypatch.setattr(processor, "multiplies_unsigned", lambda rows: False)
    lhs, rhs = integers((16, 32), dtype), integers((32, 48), dtype)
    for platform in ("cpu", "cuda", "tpu"):
        exported = jax.export.export(
            jax.jit(lambda lhs, rhs: integer_dot(lhs, rhs, MATMUL)),
            platforms=(platform,),
        )(lhs, rhs)
        module = exported.mlir_module()
        narrow = "i4" if dtype == "int4" and platform == "tpu" else "i8"
        (dot,) = [line for line in module.splitlines() if "stablehlo.dot" in line]
        assert f"(tensor<16x32x{narrow}>, tensor<32x48x{narrow}>)" in dot, platform
        assert "tensor<16x48xi32>" in dot, platform


def cpu_dots(lhs, rhs, dims):
    """The contractions that a CPU gets for one, as StableHLO."""
    dot = jax.jit(lambda lhs, rhs: integer_dot(lhs, rhs, dims))
    module = jax.export.export(dot, platforms=("cpu",))(lhs, rhs).mlir_module()
    return [line for line in module.splitlines() if "stablehlo.dot" in line]


@pytest.mark.parametrize(
    ("lhs", "rhs", "contracted"),
    [((1, 512), (8, 32, 512), 1), ((2, 3, 8, 64), (256, 8, 64), 2)],
)
@pytest.mark.usefixtures("unsigned")
def test_cpus_get_a_matrix_where_rhs_has_its_products_last(lhs, rhs, contracted):
    """As frozen weights lie: anything but a matrix is copied at every call."""
    last = tuple(tuple(range(len(s) - contracted, len(s))) for s in (lhs, rhs))
    dims = (last, ((), ()))
    lhs, rhs = integers(lhs, "int8"), integers(rhs, "int8", 1)
    (line,) = cpu_dots(lhs, rhs, dims)
    assert ", tensor<256x512xi8>)" in line
    np.testing.assert_array_equal(compiled_dot(lhs, rhs, dims), exact(lhs, rhs, dims))


@pytest.mark.parametrize("rows", [1, 2, 64, 65, 200])
def test_cpus_get_the_dtypes_that_they_multiply_fast(rows, unsigned):
    lhs = integers((rows, 96), "int8", extreme=True)
    rhs = integers((96, 48), "int8", 1, extreme=True)
    dots = cpu_dots(lhs, rhs, MATMUL)
    assert all(("ui8>, tensor<96x48xi8>)" in line) == unsigned for line in dots)
    # What to take off comes with a row of zeros, or else by a contraction of its own.
    assert len(dots) == (2 if unsigned and rows == 200 else 1)
    got = compiled_dot(lhs, rhs, MATMUL)
    np.testing.assert_array_equal(got, exact(lhs, rhs, MATMUL))


@pytest.mark.parametrize("products", [0, 1, 15, 16, 17, 32, 33])
@pytest.mark.usefixtures("unsigned")
def test_both_operands_transposed(products):
    """As for drhs. Compiled: XLA folds a transposition into the contraction."""
    lhs = integers((products, 1040), "int8")  # From 16 products on, over 16 KiB.
    rhs = integers((products, 5), "int8", 1)
    dims = (((0,), (0,)), ((), ()))
    got = compiled_dot(lhs, rhs, dims)
    np.testing.assert_array_equal(got, exact(lhs, rhs, dims))


@pytest.mark.usefixtures("unsigned")
def test_inside_shard_map():
    lhs, rhs = integers((64, 272), "int8"), integers((64, 72), "int8", 1)
    dims = (((0,), (0,)), ((), ()))
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")

    def summed(lhs, rhs):
        return jax.lax.psum(integer_dot(lhs, rhs, dims), "data")

    mapped = jax.shard_map(
        summed, mesh=mesh, in_specs=(rows, rows), out_specs=jax.sharding.PartitionSpec()
    )
    np.testing.assert_array_equal(jax.jit(mapped)(lhs, rhs), exact(lhs, rhs, dims))


def test_unsigned_sums_may_pass_int32_on_the_way(monkeypatch):
    """Raised by 128 they do; only the result has to fit."""
    monkeypatch.setattr(processor, "multiplies_unsigned", lambda rows: True)
    products = 133_000
    lhs = jnp.full((70, products), 127, jnp.int8)
    rhs = jnp.full((2, products), 127, jnp.int8)
    dims = (((1,), (1,)), ((), ()))
    got = compiled_dot(lhs, rhs, dims)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, 127**2 * products)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu avx2 avx512f avx512_vnni", True),
        ("fpu avx512_vnni amx_int8 amx_tile", False),
        ("fpu avx2 avx_vnni", True),
        ("fpu avx2 avx_vnni avx_vnni_int8", True),
        ("fpu avx2", False),
        ("", False),
    ],
)
def test_which_processors_multiply_unsigned(flags, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor : 0\nmodel name : any\nflags\t\t: {flags}\n\n" * 2)
    assert processor.reads_as_unsigned(path) == expected
    assert not processor.reads_as_unsigned(tmp_path / "missing")


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("AVX512_VNNI", True), ("AVX512", False), ("avx2", False), ("unknown", True)],
)
def test_xla_may_use_less_than_the_processor_has(
    limit, expected, tmp_path, monkeypatch
):
    monkeypatch.setenv("XLA_FLAGS", f"--other=1 --xla_cpu_max_isa={limit}")
    path = tmp_path / "cpuinfo"
    path.write_text("flags : fpu avx2 avx512f avx512_vnni avx512_bf16\n")
    assert processor.reads_as_unsigned(path) == expected


@pytest.mark.code("quick")
@pytest.mark.parametrize("case", DIMENSION_NUMBERS)
def test_tpus_get_the_contraction_as_it_is(case):
    lhs_shape, rhs_shape, dims = DIMENSION_NUMBERS[case]
    lhs, rhs = integers(lhs_shape, "int8"), integers(rhs_shape, "int8")
    dot = jax.jit(lambda lhs, rhs: integer_dot(lhs, rhs, dims))
    module = jax.export.export(dot, platforms=("tpu",))(lhs, rhs).mlir_module()
    # Around it stands a choice of platform, by a constant.
    operations = set(re.findall(r"stablehlo\.(\w+)", module))
    assert operations - {"case", "return", "constant"} == {"dot_general"}
    assert module.count("stablehlo.dot_general") == 1


@pytest.mark.parametrize("case", DIMENSION_NUMBERS)
@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        pytest.param("bfloat16", marks=pytest.mark.code("quick")),
        pytest.param("float16", marks=pytest.mark.code("quick")),
    ],
)
@pytest.mark.usefixtures("unsigned")
def test_mixed_dot(case, dtype):
    """Floats in digits: within 2^-22 of the largest magnitude, 2^-14 for two."""
    lhs_shape, rhs_shape, dims = DIMENSION_NUMBERS[case]
    floats = [normal(lhs_shape, 1, dtype), normal(rhs_shape, 2, dtype)]
    stored = [integers(lhs_shape, "int8"), integers(rhs_shape, "int8", 1)]
    pairs = (floats[0], stored[1]), (stored[0], floats[1])
    out_dtypes = dict.fromkeys(("float32", dtype))

    @jax.jit
    def run(pairs):
        return [
            [mixed_dot(*pair, dims, out_dtype=jnp.dtype(d)) for d in out_dtypes]
            for pair in pairs
        ]

    for (lhs, rhs), results in zip(pairs, run(pairs), strict=True):
        for out_dtype, got in zip(out_dtypes, results, strict=True):
            assert got.dtype == jnp.float32
            step = 2.0**-22 if out_dtype == "float32" else 2.0**-14
            largest = [np.abs(np.asarray(x, np.float64)).max() for x in (lhs, rhs)]
            products = dn.contraction_size(dims, lhs_shape)
            bound = products * step * largest[0] * largest[1]
            assert np.abs(got - exact(lhs, rhs, dims)).max() <= bound


def test_digits_of_integers():
    x = np.array([0, 1, -1, 127, 128, 255, -255, -129, 32639, -32768], np.int16)
    parts = np.asarray(digits.of_integers(jnp.asarray(x), 2), np.int64)
    np.testing.assert_array_equal(parts[0] + 256 * parts[1], x)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(-30, 30), st.sampled_from([2, 3]))
def test_digits_of_floats(seed, exponent, count):
    """Nothing but the rounding to half a unit differs."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((3, 50)) * 10.0**exponent).astype(np.float32)
    parts, unit = digits.of_floats(jnp.asarray(x), (1,), count)
    powers = 256.0 ** np.arange(count).reshape(-1, 1, 1)
    value = (np.asarray(parts, np.float64) * powers).sum(0) * np.float64(unit)
    error = np.abs(value - x)
    assert np.all(error <= np.float64(unit) / 2)
    largest = np.abs(x).max(1, keepdims=True)
    assert np.all(unit <= largest * 2.0 ** (3 - 8 * count))
    assert parts.dtype == jnp.int8 and np.all(np.log2(unit) % 1 == 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_mixed_dot_of_what_is_not_finite(bad):
    """The row of a NaN or an infinity is NaN, and no other."""
    lhs = jnp.ones((3, 8)).at[1, 2].set(bad)
    got = mixed_dot(
        lhs, integers((8, 4), "int8"), MATMUL, out_dtype=jnp.dtype("float32")
    )
    finite = np.isfinite(np.asarray(got))
    np.testing.assert_array_equal(finite, [[True] * 4, [False] * 4, [True] * 4])


@pytest.mark.parametrize("magnitude", [0.0, 1e-40, 1e-30, 3e38])
def test_mixed_dot_of_extreme_magnitudes(magnitude):
    lhs = jnp.full((2, 1), magnitude, jnp.float32)
    rhs = jnp.full((1, 2), 1, jnp.int8)
    got = mixed_dot(lhs, rhs, MATMUL, out_dtype=jnp.dtype("float32"))
    np.testing.assert_allclose(got, lhs @ np.ones((1, 2)), rtol=2e-7, atol=1e-38)


@pytest.mark.code("quick")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", DIMENSION_NUMBERS)
def test_float_dot_of_halves(case, dtype):
    """Summed in float32, in every layout."""
    lhs_shape, rhs_shape, dims = DIMENSION_NUMBERS[case]
    lhs, rhs = normal(lhs_shape, 1, dtype), normal(rhs_shape, 2, dtype)
    got = jax.jit(lambda *xs: contract(lowering.Floats(), *xs, dims))(lhs, rhs)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, exact(lhs, rhs, dims), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [300, 4096])
def test_sums_of_int16_are_exact(size):
    """Of the doubled halves of 8 bits, as long as int32 holds the sums."""
    lhs, rhs = integers((2, size), "int16", extreme=True), jnp.full((size, 2), 255)
    rhs = rhs.astype(jnp.int16)
    got = integer_dot(lhs, rhs, MATMUL, largest=(255, 255))
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, exact(lhs, rhs, MATMUL))


def test_amx_is_for_processors_that_have_it(tmp_path, monkeypatch):
    """As far as XLA may use it: Linux is not asked otherwise."""
    monkeypatch.setattr(processor, "_CPUINFO", tmp_path / "cpuinfo")
    may_use_amx = processor.may_use_amx.__wrapped__
    assert not may_use_amx()
    (tmp_path / "cpuinfo").write_text("flags : avx2 avx512_vnni amx_int8 amx_tile\n")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX512_BF16")
    assert not may_use_amx()
