"""Sub-channel blocks in convolutions, against floats of the dequantized operands."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import calibration, numerics
from aqtlite.config import Blocks, DotGeneral, DotGeneralRaw, LocalAqt, Tensor
from tests.common import normal, quick_jit, rms_error
from tests.convolutions import Case, reference

pytestmark = pytest.mark.code("quick")

INT8 = Tensor(numerics=numerics.IntSymmetric(bits=8))
REUSED = Tensor(numerics=INT8.numerics, use_fwd_quant=True)

CASES = {
    "strides": Case(
        lhs=(4, 5, 6, 8), rhs=(3, 2, 8, 6), strides=(2, 3), padding=((0, 2), (1, -1))
    ),
    "dilations": Case(
        lhs=(4, 5, 6, 8), rhs=(3, 2, 8, 6), lhs_dilation=(2, 1), rhs_dilation=(1, 2)
    ),
    "groups": Case(lhs=(4, 5, 6, 8), rhs=(3, 2, 4, 12), feature_groups=2),
    "batch_groups": Case(lhs=(8, 5, 6, 4), rhs=(3, 2, 4, 12), batch_groups=2),
}
PLAIN = Case(lhs=(4, 5, 6, 8), rhs=(3, 2, 8, 6))


def int8(**blocks):
    return Tensor(numerics=INT8.numerics, blocks=Blocks(**blocks))


def raw(lhs, rhs, **fields):
    return DotGeneralRaw(lhs=lhs, rhs=rhs, **fields)


SIZES = DotGeneral(
    fwd=raw(int8(size=2), int8(size=4)),
    dlhs=raw(int8(size=3), int8(size=2)),
    drhs=raw(int8(size=1), int8(size=2)),
)


def operands(case):
    """Operands, and a cotangent, whose magnitudes differ as blocks are there for."""
    out = reference(case, np.zeros(case.lhs), np.zeros(case.rhs))[0].shape
    of_features = (1, 1, 1, case.lhs[-1]), (1, 1, *case.rhs[2:]), (out[0], 1, 1, out[3])
    return tuple(
        normal(shape, i) * jnp.exp(normal(spread, 5 + i))
        for i, (shape, spread) in enumerate(
            zip((case.lhs, case.rhs, out), of_features, strict=True)
        )
    )


@functools.partial(quick_jit, static_argnums=(0, 1))
def evaluate(cfg, case, x, w, g):
    """The result and both gradients."""
    conv = aqtlite.make_conv_general_dilated(cfg)
    out, vjp = jax.vjp(lambda x, w: conv(x, w, *case.geometry), x, w)
    return out, *vjp(g)


def dequantized(x, tensor, window, cut):
    """What an operand is rounded to, of which the axis `cut` is in blocks."""
    if not tensor.is_quantized:
        return x
    return aqtlite.quantize(x, tensor, (*window, cut), window=window).dequant()


@functools.partial(quick_jit, static_argnums=0)
def rounded(cfg, x, w, g):
    """The operands of the convolution, and of its gradients, as they are rounded."""
    x_q = dequantized(x, cfg.fwd.lhs, (1, 2), 3)
    w_q = dequantized(w, cfg.fwd.rhs, (0, 1), 2)
    of_dlhs, of_drhs = cfg.dlhs, cfg.drhs
    w_back = (
        w_q if of_dlhs.rhs.use_fwd_quant else dequantized(w, of_dlhs.rhs, (0, 1), 3)
    )
    x_back = (
        x_q if of_drhs.rhs.use_fwd_quant else dequantized(x, of_drhs.rhs, (1, 2), 0)
    )
    return (
        (x_q, w_q),
        (dequantized(g, of_dlhs.lhs, (1, 2), 3), w_back),
        (dequantized(g, of_drhs.lhs, (1, 2), 0), x_back),
    )


def wanted(cfg, case, x, w, g):
    """The result and both gradients, of the dequantized operands of each."""
    (x_q, w_q), (g_lhs, w_back), (g_rhs, x_back) = jax.tree.map(
        lambda one: np.asarray(one, float), rounded(cfg, x, w, g)
    )
    out, _ = reference(case, x_q, w_q)
    _, gradients = reference(case, x_back, w_back)
    return out, gradients(g_lhs)[0], gradients(g_rhs)[1]


def check(cfg, case, limit=1e-6):
    arrays = operands(case)
    for got, one in zip(
        evaluate(cfg, case, *arrays), wanted(cfg, case, *arrays), strict=True
    ):
        assert rms_error(got, one) < limit


@pytest.mark.parametrize("name", CASES)
def test_is_that_of_the_dequantized_operands(name):
    check(SIZES, CASES[name])


@st.composite
def configs(draw):
    def tensor(sizes):
        size = draw(st.sampled_from([None, *sizes]))
        remaining = draw(st.sampled_from([1, 2]))
        if size is None:
            return INT8
        return int8(size=size, remaining_size=remaining)

    features = [1, 2, 4, 8]
    return DotGeneral(
        fwd=raw(tensor(features), tensor(features)),
        dlhs=raw(tensor([1, 2, 3, 6]), tensor([1, 2, 3, 6])),
        drhs=raw(tensor([1, 2, 4]), tensor([1, 2, 4])),
    )


@hypothesis.given(configs())
@hypothesis.settings(max_examples=2, deadline=None)
def test_any_sizes(cfg):
    check(cfg, PLAIN)


SQUARES = int8(size=4, remaining_size=2)
AFFINE = Tensor(
    numerics=numerics.IntAffine(),
    calibration=calibration.MinMax(),
    blocks=Blocks(size=4),
)
FP8 = Tensor(numerics=numerics.Float.from_dtype("float8_e4m3fn"), blocks=Blocks(size=4))
OTHERS = {
    "weights alone": DotGeneral(fwd=raw(Tensor(), SQUARES)),
    "squares are taken again": DotGeneral(
        fwd=raw(SQUARES, SQUARES),
        dlhs=raw(int8(size=3), REUSED),
        drhs=raw(int8(size=1), REUSED),
    ),
    "floats": DotGeneral(fwd=raw(FP8, FP8)),
    "zero points": DotGeneral(fwd=raw(AFFINE, int8(size=2))),
    "zero points of both": DotGeneral(fwd=raw(AFFINE, AFFINE)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_operands(name):
    check(OTHERS[name], PLAIN)


@pytest.mark.parametrize("name", ["groups", "batch_groups"])
def test_grouped_squares_and_zero_points(name):
    """Squares of 8 output features lie across groups of 6."""
    across = int8(size=4, remaining_size=4)
    cfg = DotGeneral(fwd=raw(AFFINE, across), dlhs=raw(int8(size=2), REUSED))
    check(cfg, CASES[name])


@pytest.mark.parametrize(
    "case",
    [
        Case(lhs=(2, 5, 6, 8), rhs=(3, 2, 1, 8), feature_groups=8),
        Case(lhs=(2, 5, 6, 8), rhs=(3, 2, 1, 16), feature_groups=8),
        Case(lhs=(2, 5, 6, 8), rhs=(3, 2, 2, 8), feature_groups=4),
        Case(lhs=(8, 5, 6, 2), rhs=(3, 2, 2, 8), batch_groups=4),
    ],
    ids=["depthwise", "multiplier", "groups", "batch_groups"],
)
def test_noise_of_gradients_beside_squares_across_groups(case):
    """Stochastic rounding seeds each channel from the scales of the forward pass."""
    noisy = Tensor(
        numerics=numerics.IntSymmetric(
            bits=8, preserve_max_val=True, stochastic_rounding=True
        )
    )
    across = int8(size=16, remaining_size=4, fit=True)
    cfg = DotGeneral(
        fwd=raw(INT8, across), dlhs=raw(noisy, REUSED), drhs=raw(noisy, REUSED)
    )
    x, w, g = operands(case)
    # A channel that is a group by itself has a scale by itself.
    shared = (1, 2) if case.feature_groups == case.lhs[-1] else (1, 2, 3)
    x_q = np.asarray(aqtlite.quantize(x, INT8, shared).dequant())
    w_q = np.asarray(dequantized(w, across, (0, 1), 2))
    exact, gradients = reference(case, x_q, w_q)
    got, *got_gradients = evaluate(cfg, case, x, w, g)
    assert rms_error(got, exact) < 1e-6
    for got, one in zip(got_gradients, gradients(np.asarray(g)), strict=True):
        assert 0 < rms_error(got, one) < 0.05


@pytest.mark.code("users")
def test_tiles_are_blocks():
    """``local_aqt`` cuts what ``blocks`` of as many would."""
    tiles = DotGeneral(
        fwd=raw(INT8, INT8),
        dlhs=raw(INT8, INT8, local_aqt=LocalAqt(contraction_axis_shard_count=3)),
        drhs=raw(INT8, INT8, local_aqt=LocalAqt(contraction_axis_shard_count=2)),
    )
    thirds, halves = int8(count=3), int8(count=2)
    blocks = DotGeneral(
        fwd=raw(INT8, INT8), dlhs=raw(thirds, thirds), drhs=raw(halves, halves)
    )
    arrays = operands(PLAIN)
    for got, one in zip(
        evaluate(tiles, PLAIN, *arrays), evaluate(blocks, PLAIN, *arrays), strict=True
    ):
        np.testing.assert_array_equal(got, one)


def test_what_the_forward_pass_cannot_leave_is_quantized_again():
    """Blocks of features do not leave the sums over output features or examples."""
    features = int8(size=4)
    cfg = DotGeneral(
        fwd=raw(features, features), dlhs=raw(INT8, REUSED), drhs=raw(INT8, REUSED)
    )
    again = DotGeneral(
        fwd=raw(features, features), dlhs=raw(INT8, INT8), drhs=raw(INT8, INT8)
    )
    x, w, g = operands(PLAIN)
    x_q, w_q = rounded(cfg, x, w, g)[0]
    found = evaluate(cfg, PLAIN, x, w, g)[1:]
    for got, one in zip(found, wanted(again, PLAIN, x_q, w_q, g)[1:], strict=True):
        assert rms_error(got, one) < 1e-6


@pytest.mark.code("users")
def test_a_depthwise_convolution_has_nothing_to_cut():
    case = Case(lhs=(4, 5, 6, 3), rhs=(3, 2, 1, 3), feature_groups=3)
    arrays = operands(case)
    cfg = DotGeneral(fwd=raw(int8(size=32), int8(size=32)))
    channels = DotGeneral(fwd=raw(INT8, INT8))
    np.testing.assert_array_equal(
        evaluate(cfg, case, *arrays)[0], evaluate(channels, case, *arrays)[0]
    )


@pytest.mark.code("users")
def test_one_dimension_and_transformations():
    cfg = DotGeneral(fwd=raw(int8(size=2), int8(size=4)))
    conv = aqtlite.make_conv_general_dilated(cfg)
    x, w = normal((2, 3, 8, 7)), normal((6, 8, 3), 1)

    @jax.jit
    def one(x, w=w):
        return conv(x, w, (2,), "SAME")

    @jax.jit
    def of_rounded(x, w):
        x_q = aqtlite.quantize(x, cfg.fwd.lhs, (2, 1), window=(2,)).dequant()
        w_q = aqtlite.quantize(w, cfg.fwd.rhs, (2, 1), window=(2,)).dequant()
        return jax.lax.conv(x_q, w_q, (2,), "SAME")

    assert rms_error(one(x[0]), of_rounded(x[0], w)) < 1e-6
    each = jnp.stack([one(row) for row in x])
    for mapped in (jax.vmap(one), lambda x: jax.lax.map(jax.checkpoint(one), x)):
        np.testing.assert_array_equal(jax.jit(mapped)(x), each)
    both = jax.jit(jax.vmap(one))(x, jnp.stack([w, -w]))
    np.testing.assert_array_equal(both, each * jnp.array([1, -1])[:, None, None, None])


def test_half_precision():
    x, w, g = (one.astype("bfloat16") for one in operands(PLAIN))
    for got, one in zip(
        evaluate(SIZES, PLAIN, x, w, g), wanted(SIZES, PLAIN, x, w, g), strict=True
    ):
        assert got.dtype == "bfloat16" and rms_error(got, one) < 4e-3


@pytest.mark.code("users")
def test_a_given_qtensor():
    cfg = DotGeneral(fwd=raw(int8(size=2), int8(size=4)))
    conv = jax.jit(
        lambda x, w: aqtlite.make_conv_general_dilated(cfg)(x, w, *PLAIN.geometry)
    )
    x, w, _ = operands(PLAIN)
    q = aqtlite.quantize(w, cfg.fwd.rhs, (0, 1, 2), window=(0, 1))
    assert q.scale.shape == (1, 1, 2, 6)
    for given in (q, q.stored_in((3, 0, 1, 2))):
        np.testing.assert_array_equal(conv(x, given), conv(x, w))
    with pytest.raises(ValueError, match=r"along the axes \[0, 1\].*window=\(0, 1\)"):
        conv(x, aqtlite.quantize(w, cfg.fwd.rhs, (0, 1, 2)))
    padded = Tensor(numerics=INT8.numerics, blocks=Blocks(size=5, pad=True))
    with pytest.raises(ValueError, match=r"padded by \(0, 0, 2, 0\), which dot_gen"):
        conv(x, aqtlite.quantize(w, padded, (0, 1, 2), window=(0, 1)))


@pytest.mark.parametrize(
    ("cfg", "match"),
    [
        (
            DotGeneral(fwd=raw(int8(size=3), INT8)),
            r"fwd.lhs.blocks.size=3 does not divide an axis of 4;.* shape "
            r"\(4, 5, 6, 8\).*window, \(1, 2\), are never cut, and each of 2 groups",
        ),
        (
            DotGeneral(
                fwd=raw(INT8, INT8),
                drhs=raw(
                    INT8, INT8, local_aqt=LocalAqt(contraction_axis_shard_count=3)
                ),
            ),
            r"drhs.local_aqt.contraction_axis_shard_count=3 does not divide axis 0",
        ),
        (
            DotGeneral(fwd=raw(int8(size=3, pad=True), INT8)),
            r"fwd.lhs.blocks.size=3 does.*padded for dot_general and einsum alone",
        ),
    ],
)
def test_refused(cfg, match):
    with pytest.raises(ValueError, match=match):
        evaluate(cfg, CASES["groups"], *operands(CASES["groups"]))


def test_a_window_that_is_not_contracted():
    with pytest.raises(ValueError, match=r"window=\(0,\) must be some of axes=\(1,\)"):
        aqtlite.quantize(normal((4, 4)), int8(size=2), 1, window=(0,))
