"""The function that `make_dot_general` returns: outputs, dtypes, configs, errors."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import aqtlite
from aqtlite import config
from tests.common import (
    DIMENSION_NUMBERS,
    MATMUL,
    assert_same,
    nearest,
    normal,
    operands,
    quick_jit,
    relative_error,
    rms_error,
    tensor,
)

pytestmark = pytest.mark.code("quick")

X, W = normal((4, 8)), normal((8, 3), 1)
DOT = aqtlite.make_dot_general(nearest())


def forward(lhs=None, rhs=None, **fields):
    """A config that quantizes the forward contraction only."""
    return config.DotGeneral(
        fwd=config.DotGeneralRaw(
            lhs=lhs or config.Tensor(), rhs=rhs or config.Tensor(), **fields
        )
    )


def run(cfg, lhs=X, rhs=W, dims=MATMUL, **kwargs):
    return aqtlite.make_dot_general(cfg)(lhs, rhs, dims, **kwargs)


@pytest.mark.parametrize("case", DIMENSION_NUMBERS)
def test_close_to_float(case):
    lhs, rhs, dims = operands(case)
    run = quick_jit(
        lambda lhs, rhs: [dot(lhs, rhs, dims) for dot in (DOT, jax.lax.dot_general)]
    )
    got, wanted = run(lhs, rhs)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    assert relative_error(got, wanted) < 0.02


def test_error_halves_with_every_bit():
    x, w = normal((64, 128)), normal((128, 32), 1)
    wanted = x @ w
    errors = {bits: rms_error(run(nearest(bits), x, w), wanted) for bits in (8, 6, 4)}
    assert 3 < errors[6] / errors[8] < 5 and 3 < errors[4] / errors[6] < 5
    assert errors[8] < 0.015


def test_same_function_for_equal_configs_and_hashable():
    again = aqtlite.make_dot_general(nearest())
    assert again is DOT and hash(again) == hash(DOT)
    assert aqtlite.make_dot_general(nearest(4)) != DOT


@pytest.mark.code("users")
def test_jnp_einsum_takes_it():
    got = jnp.einsum("bk,kn->bn", X, W, _dot_general=DOT)
    np.testing.assert_array_equal(got, DOT(X, W, MATMUL))


@pytest.mark.code("users")
@pytest.mark.parametrize("cfg", [None, config.unquantized()])
def test_unquantized_is_lax_dot_general(cfg):
    dot = aqtlite.make_dot_general(cfg)
    np.testing.assert_array_equal(
        dot(X, W, MATMUL, key=jax.random.key(0)), jax.lax.dot_general(X, W, MATMUL)
    )
    integer = dot(X.astype("int8"), W.astype("int8"), MATMUL, None, jnp.int32)
    assert integer.dtype == jnp.int32
    jaxprs = [
        str(jax.make_jaxpr(lambda x, w, f=f: f(x, w, MATMUL, "highest"))(X, W))
        for f in (dot, jax.lax.dot_general)
    ]
    assert jaxprs[0] == jaxprs[1]


def test_integers_are_contracted():
    lowered = jax.jit(lambda x, w: DOT(x, w, MATMUL)).lower(X, W).as_text()
    dots = [line for line in lowered.splitlines() if "stablehlo.dot_general" in line]
    assert dots and all(re.search(r"x(u?i8|si8)>", dot) for dot in dots)
    assert not any("f32" in dot for dot in dots)


def test_weight_only_contracts_float_activations():
    got = run(config.weight_only(4))
    wanted = X @ aqtlite.quantize(W, tensor(4), 0).dequant()
    assert relative_error(got, wanted) < 1e-5


def test_fake_quant():
    fake = {"use_fake_quant": True}
    got = run(forward(tensor(8, **fake), tensor(4, **fake)))
    assert relative_error(got, run(forward(tensor(8), tensor(4)))) < 1e-5
    wanted = (
        aqtlite.quantize(X, tensor(8), 1).dequant()
        @ aqtlite.quantize(W, tensor(4), 0).dequant()
    )
    assert relative_error(got, wanted) < 1e-5


@pytest.mark.parametrize(
    "fields",
    [
        {"dg_in_dtype": "float32"},
        {"dg_in_dtype": "bfloat16", "dg_accumulator_dtype": "float32"},
        {"dg_accumulator_dtype": "int32"},
        {"dg_accumulator_dtype": "float32"},
    ],
)
def test_contraction_dtypes(fields):
    """8-bit integers are exact in bfloat16 too."""
    got = run(forward(tensor(8), tensor(8), **fields))
    assert relative_error(got, DOT(X, W, MATMUL)) < 1e-6


@pytest.mark.code("users")
@pytest.mark.parametrize(
    ("lhs", "rhs", "wanted"),
    [
        ("float32", "float32", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float16", "float16", "float16"),
        ("bfloat16", "float32", "float32"),
        ("float32", "float16", "float32"),
        ("bfloat16", "float16", "float32"),
    ],
)
def test_output_dtype(lhs, rhs, wanted):
    x, w = X.astype(lhs), W.astype(rhs)
    got = DOT(x, w, MATMUL)
    exact = DOT(x.astype("float32"), w.astype("float32"), MATMUL)
    assert got.dtype == wanted
    np.testing.assert_array_equal(got, exact.astype(wanted))
    narrow = DOT(x, w, MATMUL, preferred_element_type=jnp.bfloat16)
    np.testing.assert_array_equal(narrow, exact.astype(jnp.bfloat16))
    assert DOT(x, w, MATMUL, None, jnp.float32).dtype == jnp.float32


@pytest.mark.parametrize(
    "precision", ["highest", jax.lax.Precision.HIGH, ("high",) * 2]
)
def test_refuses_a_precision(precision):
    with pytest.raises(ValueError, match=r"precision=.*summed exactly"):
        DOT(X, W, MATMUL, precision)


FORWARD_ALONE = config.DotGeneral(fwd=nearest().fwd)


@pytest.mark.parametrize(
    ("cfg", "how_often"),
    [
        (FORWARD_ALONE, 2),
        (config.update(nearest(), {"dlhs": config.DotGeneralRaw()}), 1),
        (config.weight_only(), 3),
        (config.DotGeneral(dlhs=nearest(use_fwd_quant=False).dlhs), 2),
    ],
    ids=["forward", "one gradient", "weights", "one in integers"],
)
def test_a_precision_of_what_stays_in_float(cfg, how_often):
    """Of three contractions. (On a CPU, digits take the place of floats.)"""
    dot = aqtlite.make_dot_general(cfg)

    def loss(x, w):
        return dot(x, w, MATMUL, "highest").sum()

    step = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(X, W)
    text = step.lower(lowering_platforms=("tpu",)).as_text()
    dots = [line for line in text.splitlines() if "dot_general" in line]
    assert len(dots) == 3
    assert sum("HIGHEST, HIGHEST" in line for line in dots) == how_often


@pytest.mark.code("users")
@pytest.mark.parametrize("precision", [None, "default", jax.lax.Precision.DEFAULT])
def test_takes_the_default_precision(precision):
    assert_same(DOT(X, W, MATMUL, precision), DOT(X, W, MATMUL))


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8", "bool", "complex64"])
def test_refuses_what_is_not_floating(dtype):
    with pytest.raises(TypeError, match=rf"fwd.rhs must be float32.*{dtype}.*\(8, 3\)"):
        DOT(X, W.astype(dtype), MATMUL)


@pytest.mark.parametrize(
    ("lhs", "rhs", "dims"),
    [
        (X[0], W, MATMUL),
        (X, W[:-1], MATMUL),
        (X, W, (((1,), (0,)), ((0,), (1,)))),
        (X, W, (((-1,), (0,)), ((), ()))),
    ],
)
def test_refuses_what_lax_refuses(lhs, rhs, dims):
    with pytest.raises((TypeError, ValueError)):
        jax.lax.dot_general(lhs, rhs, dims)
    with pytest.raises((TypeError, ValueError), match="dimension_numbers|axes of lhs"):
        DOT(lhs, rhs, dims)


CONV = aqtlite.make_conv_general_dilated(nearest())
RAGGED_DOT = aqtlite.make_ragged_dot(nearest())


@pytest.mark.parametrize(
    ("layer", "name", "argument"),
    [
        (nn.Conv(3, (1,), conv_general_dilated=DOT), "make_dot_general", "numbers"),
        (nn.Conv(3, (1,), conv_general_dilated=RAGGED_DOT), "make_ragged_dot", ""),
        (nn.Dense(3, dot_general=CONV), "make_conv_general_dilated", "padding"),
    ],
)
def test_the_function_of_another_operation_in_a_layer(layer, name, argument):
    words = rf"{name}\(cfg\) was called .* another function \(.*{argument}"
    places = r"layers take make_dot_general\(cfg\) as dot_general=, and make_conv_g"
    with pytest.raises(TypeError, match=f"{words}.*{places}"):
        layer.init(jax.random.key(0), X)


@pytest.mark.parametrize("function", [CONV, RAGGED_DOT])
def test_the_function_of_another_operation_in_an_einsum(function):
    words = r"another function \(\w+ are .*, dimension numbers of a dot_general\)"
    with pytest.raises(TypeError, match=words):
        jnp.einsum("ab,bc->ac", X, W, _dot_general=function)


def test_refuses_an_equation():
    layer = nnx.Einsum("ab,bc->ac", (8, 3), einsum_op=DOT, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"the equation 'ab,bc->ac'; AqtEinsum\(cfg\)"):
        layer(X)


@pytest.mark.parametrize("cfg", [8, "int8", config.DotGeneralRaw(), {}])
def test_refuses_what_is_not_a_config(cfg):
    with pytest.raises(TypeError):
        aqtlite.make_dot_general(cfg)


def test_very_long_contraction():
    """More products of 127 * 127 than int32 holds, exact to float32's rounding."""
    size = 140_001
    got = run(nearest(), jnp.ones((2, size)), jnp.ones((size, 1)))
    scale = np.float64(np.float32(1) / np.float32(127.5))
    np.testing.assert_allclose(got, (127 * scale) ** 2 * size, rtol=5e-7)


@pytest.mark.code("users")
@pytest.mark.parametrize(
    ("lhs", "rhs"),
    [((0, 8), (8, 3)), ((4, 0), (0, 3)), ((4, 8), (8, 0)), ((0, 0), (0, 0))],
)
def test_empty_axes(lhs, rhs):
    got = DOT(jnp.ones(lhs), jnp.ones(rhs), MATMUL)
    assert_same(got, jnp.zeros((lhs[0], rhs[1])))


@pytest.mark.code("users")
def test_zeros():
    assert_same(DOT(jnp.zeros((4, 8)), W, MATMUL), jnp.zeros((4, 3)))
    assert_same(DOT(X.at[1].set(0), W, MATMUL), DOT(X, W, MATMUL).at[1].set(0))


@pytest.mark.code("users")
@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_what_is_not_finite_poisons_its_channel_alone(value):
    clean = DOT(X, W, MATMUL)
    by_row = DOT(X.at[1, 2].set(value), W, MATMUL)
    assert np.all(np.isnan(by_row[1]))
    np.testing.assert_array_equal(np.delete(by_row, 1, 0), np.delete(clean, 1, 0))
    by_column = DOT(X, W.at[5, 2].set(value), MATMUL)
    assert np.all(np.isnan(by_column[:, 2]))
    np.testing.assert_array_equal(by_column[:, :2], clean[:, :2])


def test_per_tensor():
    per_tensor = tensor(8, calib_shared_axes="per_tensor")
    got = run(forward(per_tensor, per_tensor))
    lhs, rhs = (aqtlite.quantize(v, per_tensor, 0) for v in (X, W))
    assert lhs.scale.size == rhs.scale.size == 1
    assert relative_error(got, lhs.dequant() @ rhs.dequant()) < 1e-5


def test_custom_shared_axes():
    x, w = normal((2, 4, 8)), normal((2, 8, 3), 1)
    dims = (((2,), (1,)), ((0,), (0,)))
    shared = tensor(8, calib_shared_axes=(0, -1))
    got = run(forward(shared, tensor(8)), x, w, dims)
    lhs = aqtlite.quantize(x, tensor(8), (0, 2))
    assert lhs.scale.shape == (1, 4, 1)
    rhs = aqtlite.quantize(w, tensor(8), 1)
    wanted = jax.lax.dot_general(lhs.dequant(), rhs.dequant(), dims)
    assert relative_error(got, wanted) < 1e-5


def test_a_scale_that_varies_along_the_contraction():
    """It cannot be taken out of the sum, but it can be multiplied in."""
    with pytest.raises(ValueError, match=r"fwd.lhs.calib_shared_axes=\(0,\).*fake"):
        run(forward(tensor(8, calib_shared_axes=(0,))))
    fake = tensor(8, calib_shared_axes=(0,), use_fake_quant=True)
    wanted = aqtlite.quantize(X, tensor(8), 0).dequant() @ W
    assert relative_error(run(forward(fake)), wanted) < 1e-5


def test_refuses_shared_axes_that_are_not_there():
    with pytest.raises(ValueError, match=r"fwd.rhs.calib_shared_axes=\(2,\).*\(8, 3\)"):
        run(forward(rhs=tensor(8, calib_shared_axes=(2,))))


@pytest.mark.code("users")
def test_po2_scale():
    po2 = tensor(8, po2_scale=True)
    lhs, rhs = aqtlite.quantize(X, po2, 1), aqtlite.quantize(W, po2, 0)
    np.testing.assert_array_equal(np.frexp(np.asarray(lhs.scale))[0], 0.5)
    got = run(forward(po2, po2))
    # All numbers are dyadic: the float contraction is exact as well.
    np.testing.assert_array_equal(got, lhs.dequant() @ rhs.dequant())


class TestQTensorOperands:
    @pytest.mark.code("users")
    def test_is_what_the_float_operand_gives(self):
        lhs = aqtlite.quantize(X, tensor(8), 1)
        rhs = aqtlite.quantize(W, tensor(8), 0)
        wanted = DOT(X, W, MATMUL)
        for args in ((X, rhs), (lhs, W), (lhs, rhs)):
            assert_same(DOT(*args, MATMUL), wanted)
            assert_same(jax.jit(lambda a, b: DOT(a, b, MATMUL))(*args), wanted)

    @pytest.mark.code("users")
    def test_int4_and_bfloat16(self):
        x, w = X.astype("bfloat16"), W.astype("bfloat16")
        cfg = forward(tensor(8), tensor(4))
        got = run(cfg, x, aqtlite.quantize(w, tensor(4), 0))
        assert_same(got, run(cfg, x, w))

    def test_refuses_other_integers(self):
        int4 = aqtlite.quantize(W, tensor(4), 0)
        with pytest.raises(TypeError, match="fwd.rhs was given a QTensor of int4"):
            DOT(X, int4, MATMUL)
        with pytest.raises(TypeError, match="asks for a float operand"):
            run(forward(lhs=tensor(8)), X, int4)

    def test_refuses_blocks_along_the_contraction(self):
        blocks = tensor(8, blocks=config.Blocks(size=4))
        with pytest.raises(ValueError, match="varies along the contracting axes"):
            DOT(X, aqtlite.quantize(W, blocks, 0), MATMUL)

    @pytest.mark.code("users")
    def test_has_no_gradient_but_lets_the_other_have_one(self):
        rhs = aqtlite.quantize(W, tensor(8), 0)
        got = jax.grad(lambda x: DOT(x, rhs, MATMUL).sum())(X)
        assert_same(got, jax.grad(lambda x: DOT(x, W, MATMUL).sum())(X))
        with pytest.raises(TypeError, match="gradient .* fwd.rhs, a QTensor"):
            jax.grad(lambda q: DOT(X, q, MATMUL).sum(), allow_int=True)(rhs)


def test_refuses_an_output_that_is_not_floating():
    dot = aqtlite.make_dot_general(config.fully_quantized())
    dims = (((1,), (0,)), ((), ()))
    x = jnp.ones((2, 3))
    with pytest.raises(TypeError, match="preferred_element_type=int8"):
        dot(x, x.T, dims, preferred_element_type=jnp.int8)
    with pytest.raises(TypeError, match=r"fwd\.lhs must be an array, got NoneType"):
        dot(None, x.T, dims)


def test_gradients_with_debug_nans():
    dot = aqtlite.make_dot_general(config.fully_quantized())
    x = jnp.ones((2, 3))
    with jax.debug_nans(True):
        got = jax.grad(lambda x: dot(x, x.T, (((1,), (0,)), ((), ()))).sum())(x)
    assert got.shape == x.shape


@pytest.mark.code("users")
@pytest.mark.parametrize("preset", [config.fully_quantized(), config.weight_only()])
def test_a_sum_behind_the_contraction_is_rounded_on_its_own(preset):
    """Not in one step with the scale, wherever the compiler finds both in one loop."""
    dot = aqtlite.make_dot_general(preset)
    x, w, bias = normal((33, 64)), normal((64, 48), 1), normal((48,), 2)
    fused = jax.jit(lambda x, w, bias: dot(x, w, MATMUL) + bias)(x, w, bias)
    alone = jax.jit(lambda x, w: dot(x, w, MATMUL))(x, w)
    np.testing.assert_array_equal(fused, np.asarray(alone) + np.asarray(bias))


@pytest.mark.parametrize("magnitude", [1e34, 3e36, 1e38])
def test_a_large_lhs_does_not_overflow(magnitude):
    dot = aqtlite.make_dot_general(config.fully_quantized())
    out = dot(jnp.full((2, 4), magnitude / 4), jnp.ones((4, 2)), MATMUL)
    np.testing.assert_allclose(out, magnitude, rtol=0.01)


@pytest.mark.code("users")
@pytest.mark.parametrize("order", [(1, 2, 0), (2, 1, 0), (0, 2, 1)])
def test_axes_of_the_result_do_not_depend_on_how_a_qtensor_is_stored(order):
    cfg = nearest()
    q = aqtlite.quantize(normal((8, 3, 5)), cfg.fwd.rhs, 0)
    stored = run(cfg, rhs=q.stored_in(order))
    np.testing.assert_array_equal(stored, run(cfg, rhs=q))
