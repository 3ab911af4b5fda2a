"""Sums of one element, which each preset leaves exact, and sums of nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import aqtlite
from aqtlite import config
from tests.common import MATMUL, mostly_slow, nearest, normal

pytestmark = pytest.mark.code("quick")

PRESETS = {name: preset.make() for name, preset in config.presets().items()}
INT8, WITHOUT_NOISE = PRESETS["fully_quantized"], nearest()
OUTER = (((), ()), ((), ()))


def one_input(cfg, x, w):
    """A layer of a scalar, an einsum, a depthwise convolution, and experts."""
    image = x.reshape(1, 4, 4, 2)
    # Convolutions refuse smoothing, of any size.
    unsmoothed = cfg and config.update(cfg, {"fwd.smoothing": None})
    convolve = aqtlite.make_conv_general_dilated(unsmoothed)
    sizes = jnp.array([10, 6], jnp.int32)
    return (
        aqtlite.make_dot_general(cfg)(x[:, :1], w[:1], MATMUL),
        aqtlite.einsum("bc,cn->nb", x[:, :1], w[:1], cfg=cfg),
        convolve(
            image,
            w[:1, :4].reshape(1, 1, 1, 4),
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=2,
        ),
        aqtlite.make_ragged_dot(cfg)(x[:, :1], w.reshape(2, 1, 8), sizes),
    )


def with_gradients(function, *args):
    out, vjp = jax.vjp(function, *args)
    return out, vjp(jax.tree.map(jnp.cos, out))


@pytest.mark.parametrize(
    "preset", mostly_slow(PRESETS, "fully_quantized", "weight_only", "nvfp4", "lsq")
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_exact_in_every_preset(preset, dtype):
    """Forward, with gradients of sums of many elements that are near the exact ones."""
    x, w = normal((16, 2), 1, dtype), normal((2, 8), 2, dtype)
    run = functools.partial(
        with_gradients, functools.partial(one_input, PRESETS[preset])
    )
    out, gradients = jax.jit(run)(x, w)
    wanted = functools.partial(with_gradients, functools.partial(one_input, None))
    wanted_out, wanted_gradients = jax.jit(wanted)(x, w)
    for got, one in zip(out, wanted_out, strict=True):
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, one)
    tolerance = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 2e-3}[dtype]
    for got, one in zip(gradients, wanted_gradients, strict=True):
        got, one = (np.asarray(each, np.float32) for each in (got, one))
        np.testing.assert_allclose(got, one, atol=tolerance * abs(one).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_result_in_every_program(dtype):
    """A bias does not make a fused multiply-add of the product and the sum."""
    x, w, bias = (normal(s, i, dtype) for i, s in enumerate([(64, 1), (1, 64), (64,)]))

    def layer(x, w, bias):
        return aqtlite.make_dot_general(INT8)(x * x, w, MATMUL) + bias

    @jax.jit
    def in_a_scan(x, w, bias):
        body = jax.checkpoint(lambda _, row: (None, layer(row[None], w, bias)[0]))
        return jax.lax.scan(body, None, x)[1]

    wanted = layer(x, w, bias)
    np.testing.assert_array_equal(jax.jit(layer)(x, w, bias), wanted)
    np.testing.assert_array_equal(in_a_scan(x, w, bias), wanted)
    mapped = jax.jit(jax.vmap(layer, (0, None, None)))(x[:, None], w, bias)
    np.testing.assert_array_equal(mapped[:, 0], wanted)


def test_operands_of_two_dtypes():
    x, w = normal((4, 1), 1, "bfloat16"), normal((1, 3), 2)
    out = aqtlite.make_dot_general(INT8)(x, w, MATMUL)
    assert out.dtype == "float32"
    np.testing.assert_array_equal(out, x.astype("float32") * w)


def test_a_qtensor_is_dequantized():
    x, w = normal((4, 1), 1), normal((1, 3), 2)
    q = aqtlite.quantize(w, WITHOUT_NOISE.fwd.rhs, 0)
    out = aqtlite.make_dot_general(WITHOUT_NOISE)(x, q, MATMUL)
    np.testing.assert_array_equal(out, x * q.dequant())


def test_a_result_is_quantized_as_asked():
    cfg = config.update(INT8, {"out.numerics": aqtlite.numerics.IntSymmetric(bits=8)})
    x, w = normal((4, 1), 1), normal((1, 3), 2)
    out = aqtlite.make_dot_general(cfg)(x, w, MATMUL)
    assert isinstance(out, aqtlite.QTensor)
    wanted = aqtlite.quantize(x * w, cfg.out, -1)
    np.testing.assert_array_equal(out.qvalue, wanted.qvalue)


def test_an_invalid_operand_is_refused_at_any_size():
    with pytest.raises(TypeError, match="fwd.rhs"):
        aqtlite.make_dot_general(INT8)(normal((4, 1)), jnp.ones((1, 3), int), MATMUL)


def test_a_symbolic_size_is_not_one():
    (size,) = export.symbolic_shape("k")
    dot_general = functools.partial(
        aqtlite.make_dot_general(INT8), dimension_numbers=MATMUL
    )
    shapes = (
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, size), (size, 3))
    )
    exported = export.export(jax.jit(dot_general))(*shapes)
    assert "xi8>" in exported.mlir_module()


# --- Gradients that sum one element, or none, of a contraction that sums several ------


@pytest.mark.parametrize("use_fwd_quant", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "x_shape, w_shape, side",
    [((8, 32), (32, 1), 0), ((1, 32), (32, 16), 1), ((32,), (32, 16), 1)],
    ids=["one output feature", "one row", "a vector"],
)
def test_gradients_of_one_product(x_shape, w_shape, side, bits, use_fwd_quant):
    """The output gradient is exact: only the operands of the forward are rounded."""
    operands = normal(x_shape, 1), normal(w_shape, 2)
    dims = (((len(x_shape) - 1,), (0,)), ((), ()))
    cfg = config.fully_quantized(
        fwd_bits=bits,
        bwd_bits=bits,
        use_fwd_quant=use_fwd_quant,
        use_stochastic_rounding=False,
    )

    def gradient(cfg, lhs, rhs):
        out, vjp = jax.vjp(
            lambda *args: aqtlite.make_dot_general(cfg)(*args, dims), lhs, rhs
        )
        return vjp(normal(out.shape, 3))[side]

    seen = list(operands)
    if use_fwd_quant:
        axis = (len(x_shape) - 1, 0)[1 - side]
        tensor = (cfg.fwd.lhs, cfg.fwd.rhs)[1 - side]
        rounded = aqtlite.quantize(operands[1 - side], tensor, axis)
        seen[1 - side] = rounded.dequant()
    got, wanted = gradient(cfg, *operands), gradient(None, *seen)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.parametrize("stride", [1, 4], ids=["one output feature", "one position"])
def test_gradients_of_one_product_in_convolutions(stride):
    x, w = normal((1, 4, 4, 3), 1), normal((1, 1, 3, 1), 2)
    if stride == 4:
        w = normal((4, 4, 3, 5), 2)
    layout = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    cfg = config.fully_quantized(use_fwd_quant=False, use_stochastic_rounding=False)

    def gradients(cfg):
        convolve = aqtlite.make_conv_general_dilated(cfg)
        _, vjp = jax.vjp(
            lambda *a: convolve(*a, (stride,) * 2, "VALID", **layout), x, w
        )
        return vjp(normal((1, 4 // stride, 4 // stride, w.shape[-1]), 3))

    side = int(stride == 4)
    got, wanted = (
        jax.jit(gradients, static_argnums=0)(one)[side] for one in (cfg, None)
    )
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


# --- Sums of nothing ------------------------------------------------------------------


def test_a_config_given_to_a_sum_of_nothing_quantizes_it():
    """As in AQT: a scale for each element, or for those that share one."""
    x, y = normal((4,), 1), normal((5,), 2)
    dot_general = aqtlite.make_dot_general(WITHOUT_NOISE)
    element = x[:, None] * y * np.float32(127 / 127.5) ** 2
    np.testing.assert_allclose(dot_general(x, y, OUTER), element, rtol=1e-6)
    got = aqtlite.einsum("i,j->ij", x, y, cfg=WITHOUT_NOISE)
    np.testing.assert_allclose(got, element, rtol=1e-6)
    shared = config.update(WITHOUT_NOISE, {"fwd.*.calib_shared_axes": "per_tensor"})
    qx, qy = (aqtlite.quantize(one, WITHOUT_NOISE.fwd.rhs, 0) for one in (x, y))
    got = aqtlite.einsum("i,j->ij", x, y, cfg=shared)
    np.testing.assert_allclose(got, qx.dequant()[:, None] * qy.dequant(), rtol=1e-6)
