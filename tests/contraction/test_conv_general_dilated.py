"""The quantized `conv_general_dilated`: results, gradients, and bad calls."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import calibration, config, numerics
from aqtlite.config import DotGeneral, DotGeneralRaw, Smoothing, Tensor
from tests.common import nearest, normal, rms_error
from tests.convolutions import CASES, reference

pytestmark = pytest.mark.code("quick")

INT8 = Tensor(numerics=numerics.IntSymmetric(bits=8))
PLAIN = CASES["plain"]


def floats(case):
    x, w = (normal(shape) for shape in (case.lhs, case.rhs))
    shape = reference(case, np.zeros(case.lhs), np.zeros(case.rhs))[0].shape
    return x, w, normal(shape, 2)


@functools.partial(jax.jit, static_argnums=(0, 1))
def evaluate(cfg, case, x, w, g):
    """The result and both gradients, for a fixed cotangent."""
    conv = aqtlite.make_conv_general_dilated(cfg)
    out, vjp = jax.vjp(lambda x, w: conv(x, w, *case.geometry), x, w)
    return out, *vjp(g.astype(out.dtype))


def check_close(cfg, case, tolerance):
    x, w, g = floats(case)
    out, gradients = reference(case, *(np.asarray(one, float) for one in (x, w)))
    wanted = out, *gradients(np.asarray(g, float))
    for got, one in zip(evaluate(cfg, case, x, w, g), wanted, strict=True):
        assert rms_error(got, one) < tolerance


@hypothesis.given(
    st.sampled_from(sorted(CASES)), st.tuples(*(st.integers(1, 2),) * 2), st.data()
)
@hypothesis.settings(max_examples=3, deadline=None)
def test_gradients_are_those_of_floats(name, strides, data):
    case = CASES[name]._replace(strides=strides)
    if max(case.feature_groups, case.batch_groups) == 1:
        case = case._replace(rhs_dilation=(1, data.draw(st.integers(1, 2))))
    check_close(nearest(), case, 0.02)


@pytest.mark.parametrize(
    ("cfg", "tolerance"),
    [
        (config.weight_only(), 0.02),
        (config.fp8(), 0.12),
        (nearest(use_fwd_quant=False), 0.02),
        (nearest(12), 0.002),
    ],
    ids=["weight_only", "fp8", "quantized_again", "12_bits"],
)
def test_other_arithmetic(cfg, tolerance):
    check_close(cfg, PLAIN, tolerance)


def test_zero_points():
    affine = Tensor(
        numerics=numerics.IntAffine(bits=8), calibration=calibration.MinMax()
    )
    cfg = DotGeneral(fwd=DotGeneralRaw(lhs=affine, rhs=INT8))
    x, w, g = floats(PLAIN)
    x = jnp.abs(x) + 1
    out, _ = reference(PLAIN, np.asarray(x, float), np.asarray(w, float))
    assert rms_error(evaluate(cfg, PLAIN, x, w, g)[0], out) < 0.02


@pytest.mark.code("users")
def test_result_is_that_of_the_integers():
    x, w, g = floats(PLAIN)
    qx, qw = aqtlite.quantize(x, INT8, (1, 2, 3)), aqtlite.quantize(w, INT8, (0, 1, 2))
    sums, _ = reference(PLAIN, *(np.asarray(q.qvalue, np.int64) for q in (qx, qw)))
    wanted = sums.astype(np.float32) * np.asarray(qw.scale) * np.asarray(qx.scale)
    np.testing.assert_array_equal(evaluate(nearest(), PLAIN, x, w, g)[0], wanted)


@pytest.mark.code("users")
def test_a_weight_given_quantized_and_stored_in_another_order():
    cfg = nearest()
    conv = aqtlite.make_conv_general_dilated(cfg)
    x, w, g = floats(PLAIN)
    q = aqtlite.quantize(w, cfg.fwd.rhs, (0, 1, 2))
    wanted = evaluate(cfg, PLAIN, x, w, g)[0]
    for given in (q, q.stored_in((3, 0, 1, 2))):
        got = jax.jit(lambda x, q: conv(x, q, *PLAIN.geometry))(x, given)
        np.testing.assert_array_equal(got, wanted)


def test_saves_integers_alone():
    x, w, _ = floats(PLAIN)
    conv = aqtlite.make_conv_general_dilated(nearest())
    _, vjp = jax.eval_shape(
        lambda x, w: jax.vjp(lambda x, w: conv(x, w, *PLAIN.geometry), x, w), x, w
    )
    saved = [leaf for leaf in jax.tree.leaves(vjp) if leaf.size >= w.size]
    assert sorted((leaf.dtype.name, leaf.shape) for leaf in saved) == [
        ("int8", PLAIN.lhs),
        ("int8", PLAIN.rhs),
    ]


@pytest.mark.code("users")
def test_noise_follows_the_key():
    conv = aqtlite.make_conv_general_dilated(config.fully_quantized())
    x, w, g = floats(PLAIN)

    @jax.jit
    def gradients(key):
        _, vjp = jax.vjp(lambda x, w: conv(x, w, *PLAIN.geometry, key=key), x, w)
        return vjp(g)

    first, again, other = (gradients(jax.random.key(i)) for i in (0, 0, 1))
    for a, b, c in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a != c).any()


@pytest.mark.code("users")
def test_is_hashable_and_maps():
    cfg = nearest()
    conv = aqtlite.make_conv_general_dilated(cfg)
    assert conv is aqtlite.make_conv_general_dilated(nearest())
    x, w, g = floats(PLAIN)
    both = jnp.stack([x, -x])
    got = jax.jit(jax.vmap(lambda x: conv(x, w, *PLAIN.geometry)))(both)
    np.testing.assert_array_equal(got[0], evaluate(cfg, PLAIN, x, w, g)[0])
    np.testing.assert_array_equal(got[1], -got[0])


def test_without_a_config_it_is_that_of_lax():
    x, w, g = floats(PLAIN)
    wanted, _ = reference(PLAIN, np.asarray(x, float), np.asarray(w, float))
    got = evaluate(None, PLAIN, x, w, g)[0]
    np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_empty_batch():
    case = PLAIN._replace(lhs=(0, 5, 6, 3))
    x, w, g = jnp.zeros(case.lhs), normal(case.rhs), jnp.zeros((0, 5, 6, 4))
    out, dx, dw = evaluate(nearest(), case, x, w, g)
    assert out.shape == (0, 5, 6, 4) and dx.shape == x.shape
    np.testing.assert_array_equal(dw, 0)


TOO_SMALL = PLAIN._replace(lhs=(2, 2, 6, 3), padding=((0, 0), (0, 0)))


@pytest.mark.parametrize(
    "case",
    [TOO_SMALL, TOO_SMALL._replace(rhs=(3, 2, 1, 3), feature_groups=3)],
    ids=["plain", "depthwise"],
)
def test_empty_result(case):
    x, w, g = normal(case.lhs), normal(case.rhs), jnp.zeros((2, 0, 5, case.rhs[-1]))
    out, dx, dw = evaluate(nearest(), case, x, w, g)
    assert out.shape == g.shape
    np.testing.assert_array_equal(dx, jnp.zeros_like(x))
    np.testing.assert_array_equal(dw, jnp.zeros_like(w))


@pytest.mark.code("users")
def test_exports_symbolic_spatial_sizes():
    # Whether the window or the result is larger depends on the symbolic size.
    case = PLAIN._replace(rhs=(3, 3, 3, 4), strides=(2, 1))
    x, w, _ = floats(case)
    conv = aqtlite.make_conv_general_dilated(nearest())
    shape = jax.export.symbolic_shape("b, h, 6, 3")
    run = jax.jit(lambda x: conv(x, w, *case.geometry))
    exported = jax.export.export(run)(jax.ShapeDtypeStruct(shape, x.dtype))
    np.testing.assert_array_equal(exported.call(x), run(x))


@pytest.mark.code("users")
@pytest.mark.parametrize("padding", ["SAME", "SAME_LOWER"])
def test_exports_a_symbolic_padding(padding):
    """With a stride, how much depends on the size."""
    x, w = normal((2, 7, 3)), normal((4, 3, 5), 1)
    conv = aqtlite.make_conv_general_dilated(nearest())
    run = jax.jit(
        lambda x: conv(x, w, (2,), padding, dimension_numbers=("NHC", "HIO", "NHC"))
    )
    shape = jax.export.symbolic_shape("b, h, 3")
    exported = jax.export.export(run)(jax.ShapeDtypeStruct(shape, x.dtype))
    for size in (6, 7):
        np.testing.assert_array_equal(exported.call(x[:, :size]), run(x[:, :size]))


def with_fwd(**fields):
    return DotGeneral(fwd=DotGeneralRaw(lhs=INT8, rhs=INT8, **fields))


@pytest.mark.parametrize(
    ("cfg", "match"),
    [
        ("int8", "takes a config.DotGeneral or None"),
        (with_fwd(smoothing=Smoothing()), "fwd.smoothing"),
    ],
)
def test_bad_configs(cfg, match):
    with pytest.raises((TypeError, ValueError), match=match):
        aqtlite.make_conv_general_dilated(cfg)


X, W = jnp.ones((2, 5, 5, 3)), jnp.ones((3, 3, 3, 4))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"x": X.astype(int)}, "fwd.lhs must be float32"),
        ({"w": aqtlite.quantize(W, INT8, 0)}, "varies along the contracting axes"),
        ({"w": jnp.ones((3, 3, 2, 4))}, "feature"),
        ({"padding": "FULL"}, "padding must be 'SAME'"),
        ({"padding": ((1, 1), 2)}, "padding must be 'SAME'"),
        ({"padding": ((1, 1), (0.5, 1))}, "padding must be 'SAME'"),
        ({"lhs_dilation": (2, 2)}, "give a sequence of"),
        ({"lhs_dilation": (1,)}, r"lhs_dilation must be 2 positive.*\(2, 5, 5, 3\)"),
        ({"rhs_dilation": 2}, "rhs_dilation must be 2 positive integers"),
        ({"window_strides": (0, 1)}, "window_strides must be 2 positive integers"),
        ({"window_strides": (1.5, 1)}, "window_strides must be 2 positive integers"),
        ({"precision": "highest"}, "has none to choose"),
        ({"preferred_element_type": jnp.int32}, "ask for a float dtype"),
        ({"feature_group_count": 2}, "feature_group_count"),
        ({"batch_group_count": 1.5}, "batch_group_count must be an integer, got 1.5"),
        ({"states": 3}, "states must be"),
    ],
)
def test_bad_calls(change, match):
    conv = aqtlite.make_conv_general_dilated(nearest())
    arguments = {
        "window_strides": (1, 1),
        "padding": "SAME",
        "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
        **change,
    }
    x, w = arguments.pop("x", X), arguments.pop("w", W)
    with pytest.raises((TypeError, ValueError), match=match):
        conv(x, w, **arguments)


def test_a_scale_that_varies_along_the_window():
    shared = Tensor(numerics=numerics.IntSymmetric(bits=8), calib_shared_axes=(3,))
    cfg = DotGeneral(fwd=DotGeneralRaw(lhs=shared, rhs=INT8))
    conv = aqtlite.make_conv_general_dilated(cfg)
    with pytest.raises(ValueError, match=r"varies along the contracting axes \[1, 2\]"):
        conv(X, W, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
