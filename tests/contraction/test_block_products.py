"""Floats in blocks in the forms of GPUs and TPUs, against the result of a CPU.

The forms run here: their custom call is replaced by what it computes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import config
from aqtlite.contraction import block_products, coded_products, unit_blocks
from aqtlite.lowering.forms import block_scaled
from aqtlite.lowering.target import Target
from tests.common import MATMUL, mostly_slow, normal, quick_jit

pytestmark = pytest.mark.code("quick")

PRESETS = {
    "block_fp8": config.block_fp8(),
    "block_fp8, 16": config.block_fp8(16),
    "mxfp8": config.mxfp8(),
    "mxfp8, e5m2": config.mxfp8(gradient="float8_e5m2"),
    "mxfp8, clipped": config.mxfp8(may_clip=True),
    "mxfp6": config.mxfp6(),
    "mxfp4": config.mxfp4(),
    "nvfp4": config.nvfp4(),
    "nvfp4, per tensor": config.nvfp4(per_tensor=True),
}
TARGETS = {
    "blackwell": Target("cuda", 1),
    "exported": Target("cuda", 1, is_exported=True),
    "tpu": Target("tpu", 1),
}
# Shapes of lhs and rhs, and dimension numbers; of 64 elements, and of some that blocks
# do not divide.
LAYOUTS = {
    "matmul": ((32, 64), (64, 48), MATMUL),
    "odd": ((5, 40), (40, 9), MATMUL),
    "batch": ((2, 32, 64), (64, 2, 16), (((2,), (0,)), ((0,), (1,)))),
    "heads": ((3, 4, 2, 64), (2, 64, 32), (((2, 3), (0, 1)), ((), ()))),
    "rows first": ((64, 32), (32, 64), (((0,), (1,)), ((), ()))),
}


def scaled_product(lhs, rhs, lhs_scale, rhs_scale):
    """What `jax.nn.scaled_matmul` computes."""
    sides = (lhs, lhs_scale), (rhs, rhs_scale)
    left, right = (
        x.astype(jnp.float32)
        * jnp.repeat(scale.astype(jnp.float32), x.shape[2] // scale.shape[2], axis=2)
        for x, scale in sides
    )
    return jnp.einsum("bmk,bnk->bmn", left, right)


@pytest.fixture(scope="module", autouse=True)
def without_kernels():
    """Has CPUs contract all floats in blocks alike: kernels take some of them."""
    with pytest.MonkeyPatch.context() as changed:
        for kernel in (unit_blocks, coded_products):
            changed.setattr(kernel, "takes", lambda *_: False)
        jax.clear_caches()
        yield
    jax.clear_caches()


@pytest.fixture
def on_target(monkeypatch):
    """A function that has contractions run in the form for a target."""

    def call(name, shape, **options):
        assert name == block_scaled.TARGET
        return scaled_product

    monkeypatch.setattr(block_scaled.jax.ffi, "ffi_call", call)
    decide = block_products.form_of
    taken = []

    def use(target):
        def form_of(_, *args):
            taken.append(decide(target, *args))
            return taken[-1]

        monkeypatch.setattr(block_products, "form_of", form_of)
        return taken

    return use


def gradients(cfg, dims):
    dot = aqtlite.make_dot_general(cfg)

    @quick_jit
    def run(x, w, g):
        out, pullback = jax.vjp(lambda x, w: dot(x, w, dims), x, w)
        return out, *pullback(g)

    return run


@functools.cache
def gradients_on_cpu(name, layout):
    """Arguments, and the result without `on_target`, once for all targets."""
    *shapes, dims = LAYOUTS[layout]
    args = arguments(*shapes, dims)
    return args, gradients(PRESETS[name], dims)(*args)


def arguments(lhs_shape, rhs_shape, dims, dtype="float32"):
    x = normal(lhs_shape, 1, dtype) * jnp.exp(normal((*lhs_shape[:-1], 1), 2, dtype))
    w = normal(rhs_shape, 3, dtype)
    out = jax.eval_shape(lambda x, w: jax.lax.dot_general(x, w, dims), x, w)
    return x, w, normal(out.shape, 4, dtype)


def assert_close(got, wanted):
    """Equal but for the order of sums in float32."""
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == other.dtype
        one, other = (np.asarray(x, np.float64) for x in (one, other))
        assert np.abs(one - other).max() <= 2e-6 * np.abs(other).max()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "name", mostly_slow(PRESETS, "block_fp8, 16", "mxfp8", "mxfp4", "nvfp4")
)
def test_forward_and_gradients_are_those_of_a_cpu(name, target, on_target):
    args, wanted = gradients_on_cpu(name, "matmul")
    taken = on_target(TARGETS[target])
    got = gradients(PRESETS[name], MATMUL)(*args)
    assert "float32" not in taken and len(taken) == 3
    assert_close(got, wanted)


@pytest.mark.parametrize("layout", ["odd", "heads"])
@pytest.mark.parametrize("name", mostly_slow(PRESETS, "mxfp8", "nvfp4"))
def test_all_layouts(name, layout, on_target):
    args, wanted = gradients_on_cpu(name, layout)
    on_target(TARGETS["blackwell"])
    assert_close(gradients(PRESETS[name], LAYOUTS[layout][-1])(*args), wanted)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_vmap(name, axes, on_target):
    x, w = normal((3, 8, 64)), normal((3, 64, 32), 1)
    x = x[0] if axes[0] is None else x
    w = w[0] if axes[1] is None else w
    dot = functools.partial(
        aqtlite.make_dot_general(PRESETS[name]), dimension_numbers=MATMUL
    )
    wanted = quick_jit(lambda x, w: jax.vmap(dot, axes)(x, w))(x, w)
    on_target(TARGETS["blackwell"])
    got = quick_jit(lambda x, w: jax.vmap(dot, axes)(x, w))(x, w)
    assert_close([got], [wanted])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype, on_target):
    args = arguments(*LAYOUTS["matmul"], dtype)
    wanted = gradients(PRESETS["nvfp4"], MATMUL)(*args)
    on_target(TARGETS["blackwell"])
    got = gradients(PRESETS["nvfp4"], MATMUL)(*args)
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == dtype
        # Sums next to the middle between two values are rounded to either.
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        bound = 2e-6 * np.abs(other).max()
        np.testing.assert_allclose(one, other, rtol=2**-7, atol=bound)


@functools.cache
def of_zeros_on_cpu(name):
    """Operands with zeros and a NaN, and their product without `on_target`."""
    x, w = normal((8, 64)).at[1].set(0), normal((64, 32), 1)
    x = x.at[2, :32].set(0).at[3, 5].set(jnp.nan).at[4].multiply(1e-30)
    dot = aqtlite.make_dot_general(PRESETS[name])
    return x, w, quick_jit(lambda x, w: dot(x, w, MATMUL))(x, w)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", mostly_slow(PRESETS, "block_fp8", "mxfp8", "nvfp4"))
def test_zeros_and_what_is_no_number(name, target, on_target):
    """A NaN makes its row NaN; blocks and rows of zeros take the scales of none."""
    dot = aqtlite.make_dot_general(PRESETS[name])
    x, w, wanted = of_zeros_on_cpu(name)
    on_target(TARGETS[target])
    got = quick_jit(lambda x, w: dot(x, w, MATMUL))(x, w)
    assert (jnp.isnan(got) == jnp.isnan(wanted)).all() and jnp.isnan(got[3]).all()
    for one, other in zip(got, wanted, strict=True):
        assert_close([jnp.nan_to_num(one)], [jnp.nan_to_num(other)])


@pytest.mark.parametrize("name", mostly_slow(PRESETS, "block_fp8, 16", "nvfp4"))
def test_convolutions_and_groups_of_rows(name, on_target):
    x, kernel = normal((2, 6, 6, 32)), normal((3, 3, 32, 32), 1)
    conv = aqtlite.make_conv_general_dilated(PRESETS[name])
    ragged = aqtlite.make_ragged_dot(PRESETS[name])
    sizes, experts = jnp.array([3, 0, 9]), normal((3, 32, 32), 2)
    layout = ("NHWC", "HWIO", "NHWC")

    def run(x, kernel, experts):
        return (
            conv(x, kernel, (1, 1), "SAME", dimension_numbers=layout),
            ragged(x[0].reshape(-1, 32), experts, sizes),
        )

    wanted = quick_jit(lambda *args: run(*args))(x, kernel, experts)
    taken = on_target(TARGETS["blackwell"])
    assert_close(quick_jit(lambda *args: run(*args))(x, kernel, experts), wanted)
    assert taken and not {"float32", "block-scaled"} & set(taken)


def test_float64_stays_float64(on_target):
    with jax.enable_x64(True):
        x, w = normal((8, 64), dtype="float64"), normal((64, 32), 1, "float64")
        on_target(TARGETS["blackwell"])
        dot = aqtlite.make_dot_general(PRESETS["mxfp8"])
        assert jax.jit(lambda: dot(x, w, MATMUL))().dtype == "float64"


def test_the_custom_call_is_that_of_jax():
    """XLA:GPU knows it by these names and no others."""

    def ours(lhs, rhs, lhs_scale, rhs_scale):
        dims = (((2,), (2,)), ((0,), (0,)))
        return block_scaled.dot(lhs, rhs, lhs_scale, rhs_scale, dims)

    values = jax.ShapeDtypeStruct((2, 128, 64), jnp.float8_e4m3fn)
    scales = jax.ShapeDtypeStruct((2, 128, 2), jnp.float8_e8m0fnu)
    calls = []
    for function in (ours, jax.nn.scaled_matmul):
        traced = jax.jit(function).trace(values, values, scales, scales)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        (line,) = (line for line in text.splitlines() if "custom_call" in line)
        calls.append(line[line.index("custom_call") :].replace("%", ""))
    without_names = [call[call.index("{") :] for call in calls]
    assert without_names[0] == without_names[1]
    assert all(f"custom_call @{block_scaled.TARGET}(" in call for call in calls)
