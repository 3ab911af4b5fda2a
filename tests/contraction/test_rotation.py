"""Operands rotated along the contracting axes, in every operation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import aqtlite
from aqtlite import config, statistics
from tests.common import (
    DIMENSION_NUMBERS,
    MATMUL,
    assert_same,
    nearest,
    normal,
    operands,
    quick_jit,
    rms_error,
    value_and_gradients,
)

pytestmark = pytest.mark.code("quick")

ROTATED = {"fwd.rotation": config.Hadamard()}
# So many bits that errors of the rotation itself would show.
FINE = config.update(config.fully_quantized(fwd_bits=16, bwd_bits=None), ROTATED)
INT4 = config.update(nearest(4), ROTATED)
FLOAT_WEIGHTS = {"fwd.rhs": config.Tensor(), "dlhs.rhs.use_fwd_quant": False}
X, W, G = normal((6, 24)), normal((24, 3), 1), normal((6, 3), 2)


def of_size(size, cfg=FINE, **fields):
    return config.update(cfg, {"fwd.rotation": config.Hadamard(size=size, **fields)})


@pytest.mark.code("users")
@pytest.mark.parametrize("case", DIMENSION_NUMBERS)
def test_products_and_gradients_stay(case):
    x, w, dims = operands(case)
    exact = functools.partial(lax.dot_general, dimension_numbers=dims)
    g = normal(jax.eval_shape(exact, x, w).shape, 3)

    @quick_jit
    def run(x, w):
        dots = aqtlite.make_dot_general(FINE), lax.dot_general
        return [value_and_gradients(dot, x, w, dims, g) for dot in dots]

    for got, wanted in zip(*run(x, w), strict=True):
        np.testing.assert_allclose(got, wanted, atol=3e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes(dtype):
    """They are rotated in float32; the result and the gradients keep them."""
    x, w, g = (y.astype(dtype) for y in (X, W, G))
    run = jax.jit(
        lambda dot, *args: value_and_gradients(dot, *args[:2], MATMUL, args[2]),
        static_argnums=0,
    )
    got = run(aqtlite.make_dot_general(FINE), x, w, g)
    for one, other in zip(got, run(lax.dot_general, x, w, g), strict=True):
        assert one.dtype == dtype
        assert rms_error(one.astype("float32"), other.astype("float32")) < 0.01


@pytest.mark.code("users")
def test_outliers_of_activations_of_4_bits():
    """They no longer take the steps of all other channels."""
    outliers = jnp.array([3, 17])
    x = normal((16, 64)).at[:, outliers].multiply(30)
    w = normal((64, 32), 1).at[outliers].divide(30)
    plain = config.update(config.qat(4), FLOAT_WEIGHTS)
    errors = [
        rms_error(aqtlite.make_dot_general(cfg)(x, w, MATMUL), x @ w)
        for cfg in (plain, config.update(plain, ROTATED))
    ]
    assert errors[1] < 0.5 * errors[0]


def test_gradients_take_the_rotated_operands():
    """Of 4 bits, they are those of the quantized forward pass, rotated back."""

    def gradients(cfg):
        dot_general = aqtlite.make_dot_general(cfg)
        return value_and_gradients(dot_general, X, W, MATMUL, G)

    cfg = config.update(config.qat(4), ROTATED)
    out, dx, dw = gradients(cfg)
    # Rows of an identity, contracted with a float, are the matrix itself.
    lhs = FLOAT_WEIGHTS
    rhs = {"fwd.lhs": config.Tensor(), "drhs.rhs.use_fwd_quant": False}
    of_lhs, of_rhs = (
        aqtlite.make_dot_general(config.update(cfg, one)) for one in (lhs, rhs)
    )
    x, w = of_lhs(X, jnp.eye(24), MATMUL), of_rhs(jnp.eye(24), W, MATMUL)
    np.testing.assert_allclose(out, x @ w, atol=1e-4)
    np.testing.assert_allclose(dx, G @ w.T, atol=1e-4)
    np.testing.assert_allclose(dw, x.T @ G, atol=1e-4)


def test_einsum_reaches_over_several_axes():
    """Heads and their channels are mixed; in blocks, channels alone."""
    x, w = normal((2, 5, 3, 8)), normal((3, 8, 6), 1)
    equation = "bthd,hdm->btm"
    wanted = jnp.einsum(equation, x, w)
    for cfg in (FINE, of_size(8), of_size(24)):
        got = aqtlite.einsum(equation, x, w, cfg=cfg)
        np.testing.assert_allclose(got, wanted, atol=3e-3)
    # A head alone is what it is in blocks: nothing is mixed over heads.
    x = x.at[:, :, 1:].set(0)
    blocks = aqtlite.einsum(equation, x, w, cfg=of_size(8, INT4))
    head = aqtlite.einsum(equation, x[:, :, :1], w[:1], cfg=of_size(8, INT4))
    all_channels = aqtlite.einsum(equation, x, w, cfg=INT4)
    assert (blocks != all_channels).any()
    assert rms_error(blocks, wanted) < 1
    assert head.shape == blocks.shape


@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_rotate_their_features(groups):
    x, w = normal((2, 9, 24)), normal((3, 24 // groups, 8), 1)

    def run(cfg, x, w):
        conv = aqtlite.make_conv_general_dilated(cfg)
        return conv(
            x,
            w,
            (1,),
            "SAME",
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=groups,
        )

    def all_of(cfg):
        out, vjp = jax.vjp(functools.partial(run, cfg), x, w)
        return out, *vjp(out)

    got, wanted = quick_jit(lambda: (all_of(FINE), all_of(None)))()
    for one, other in zip(got, wanted, strict=True):
        assert rms_error(one, other) < 2e-3
    assert rms_error(run(INT4, x, w), wanted[0]) != rms_error(
        run(nearest(4), x, w), wanted[0]
    )


def test_experts():
    x, w, sizes = normal((10, 16)), normal((3, 16, 4), 1), jnp.array([4, 0, 5])

    def all_of(dot):
        out, vjp = jax.vjp(lambda x, w: dot(x, w, sizes), x, w)
        return out, *vjp(out)

    fine = aqtlite.make_ragged_dot(FINE)
    got, wanted = quick_jit(lambda: (all_of(fine), all_of(lax.ragged_dot)))()
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=3e-3)


def test_vmap_and_remat():
    dot_general = aqtlite.make_dot_general(INT4)
    run = jax.checkpoint(lambda x, w: dot_general(x, w, MATMUL))
    xs = jnp.stack([X, 3 * X[::-1]])
    batched = jax.jit(jax.vmap(run, (0, None)))(xs, W)
    for x, got in zip(xs, batched, strict=True):
        assert_same(got, run(x, W))


@pytest.mark.parametrize("spec", [("x", None), (None, "x")])
def test_types_on_a_mesh_with_explicit_axes(spec):
    explicit = jax.sharding.AxisType.Explicit
    mesh = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(explicit,))
    spec = jax.sharding.PartitionSpec(*spec)
    sharding = jax.NamedSharding(mesh, spec)
    x = jax.ShapeDtypeStruct((6, 24), jnp.float32, sharding=sharding)
    replicated = jax.NamedSharding(mesh, jax.sharding.PartitionSpec())
    w = jax.ShapeDtypeStruct((24, 3), jnp.float32, sharding=replicated)
    for cfg in (INT4, of_size(4, INT4)):
        dot_general = aqtlite.make_dot_general(cfg)

        def run(x, w, dot_general=dot_general):
            return dot_general(x, w, MATMUL, out_sharding=replicated).sum()

        with jax.sharding.use_abstract_mesh(mesh):
            gradient = jax.eval_shape(jax.grad(run), x, w)
        assert (gradient.shape, gradient.sharding.spec) == (x.shape, spec)


def test_blocks_of_scales_and_padding():
    """A rotation comes before blocks, and before the padding that makes them whole."""
    cfg = config.update(FINE, {"fwd.*.blocks": config.Blocks(size=16, pad=True)})
    cfg = config.update(cfg, {"*.rhs.use_fwd_quant": False})
    got = value_and_gradients(aqtlite.make_dot_general(cfg), X, W, MATMUL, G)
    wanted = value_and_gradients(lax.dot_general, X, W, MATMUL, G)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=3e-3)


def test_ranges_are_those_of_rotated_operands():
    changes = {
        "fwd.lhs.calibration": aqtlite.calibration.MaxOverBatches(),
        "fwd.lhs.calib_shared_axes": "per_tensor",
    }
    cfg = config.update(INT4, changes)
    x = jnp.ones((4, 24)).at[:, 1:].set(0)
    states = statistics.init_states(cfg, x, W, MATMUL)
    states = statistics.update_states(cfg, states, x, W, MATMUL)
    found = jax.tree.leaves(states.lhs)
    assert any(np.allclose(leaf, 24**-0.5) for leaf in found)


def test_sizes_that_do_not_fit():
    dot_general = aqtlite.make_dot_general(of_size(16))
    with pytest.raises(
        ValueError, match=r"fwd.rotation.size=16 does not divide the 24"
    ):
        dot_general(X, W, MATMUL)
    # The largest power of two that divides 24.
    smaller = aqtlite.make_dot_general(of_size(16, INT4, fit=True))(X, W, MATMUL)
    assert_same(smaller, aqtlite.make_dot_general(of_size(8, INT4))(X, W, MATMUL))
    # No matrix mixes 7 channels.
    x, w = X[:, :7], W[:7]
    assert_same(
        aqtlite.make_dot_general(INT4)(x, w, MATMUL),
        aqtlite.make_dot_general(nearest(4))(x, w, MATMUL),
    )


SIXTEEN = {"drhs.rotation": config.Hadamard(size=16)}
FLOAT_FORWARD = config.update(
    config.fully_quantized(fwd_bits=None, bwd_bits=16, use_fwd_quant=False),
    {"drhs.lhs.numerics.stochastic_rounding": False},
)


def test_weight_gradient_alone():
    """Rotated along the rows, it stays what it is, and the rest is not touched."""
    x, g = normal((32, 24)), normal((32, 3), 2)
    cfg = config.update(FLOAT_FORWARD, SIXTEEN)
    run = functools.partial(value_and_gradients, dims=MATMUL)
    out, dx, dw = run(aqtlite.make_dot_general(cfg), x, W, cotangent=g)
    plain = run(aqtlite.make_dot_general(FLOAT_FORWARD), x, W, cotangent=g)
    assert_same((out, dx), plain[:2])
    assert (dw != plain[2]).any()
    np.testing.assert_allclose(dw, x.T @ g, atol=3e-3)


def test_weight_gradient_of_rows_that_blocks_pad():
    blocks = {"drhs.*.blocks": config.Blocks(size=16, pad=True)}
    cfg = config.update(FLOAT_FORWARD, SIXTEEN | blocks)
    run = functools.partial(value_and_gradients, dims=MATMUL)
    _, _, dw = run(aqtlite.make_dot_general(cfg), X, W, cotangent=G)
    np.testing.assert_allclose(dw, X.T @ G, atol=3e-3)


def test_weight_gradient_of_experts():
    """Its rows belong to several experts, and cannot be mixed."""
    x, w, sizes = normal((32, 16)), normal((3, 16, 4), 1), jnp.array([4, 0, 28])

    def gradient(**fields):
        rotation = {"drhs.rotation": config.Hadamard(size=16, **fields)}
        dot = aqtlite.make_ragged_dot(config.update(FLOAT_FORWARD, rotation))
        return jax.grad(lambda w: jnp.square(dot(x, w, sizes)).sum())(w)

    with pytest.raises(ValueError, match=r"drhs.rotation=.* mix the rows of several"):
        gradient()
    wanted = jax.grad(lambda w: jnp.square(lax.ragged_dot(x, w, sizes)).sum())(w)
    assert rms_error(gradient(fit=True), wanted) < 1e-3


def test_quantized_operands_are_refused():
    """They were quantized without the rotation."""
    q = aqtlite.quantize(W, INT4.fwd.rhs, (0,))
    with pytest.raises(ValueError, match=r"fwd.rhs was given a QTensor of shape \(24"):
        aqtlite.make_dot_general(INT4)(X, q, MATMUL)


@pytest.mark.parametrize("rows", [32, 6])
def test_nvfp4_rotates_rows_of_the_weight_gradient(rows):
    """Where a power of two divides them: of 6 rows, it rotates none."""
    x, g = normal((rows, 24)), normal((rows, 3), 2)

    def weight_gradient(cfg):
        dot_general = aqtlite.make_dot_general(cfg)
        return value_and_gradients(dot_general, x, W, MATMUL, g)[2]

    plain, rotated = map(weight_gradient, (config.nvfp4(), config.nvfp4(hadamard=True)))
    assert (plain == rotated).all() == (rows == 6)
    assert rms_error(rotated, x.T @ g) < 0.25
