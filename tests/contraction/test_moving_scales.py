"""Operands whose scales multiply the other one, one for each contracted element."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
import aqtlite.flax.nnx
from aqtlite import calibration, config, kv_cache, numerics
from aqtlite.flax import AqtDotGeneral, AqtEinsum
from tests.common import assert_same, nearest, normal, relative_error
from tests.flax.support import init

INT8 = config.for_values(nearest())
PV = "bhqk,bkhd->bqhd"
MASK = jnp.tril(jnp.ones((8, 8), bool))
P = jax.nn.softmax(jnp.where(MASK, 2 * normal((2, 3, 8, 8)), -1e30))
V = normal((2, 8, 3, 4), 1) * jnp.exp(normal((2, 8, 3, 1), 2))
G = normal((2, 8, 3, 4), 3)


def einsum(p, v, cfg=INT8, eqn=PV):
    return aqtlite.einsum(eqn, p, v, cfg=cfg)


def gradients(function, *args):
    return jax.jit(lambda *args: jax.vjp(function, *args)[1](G))(*args)


def test_it_equals_a_cache_of_the_same_values():
    """The integers are those of a KV cache, which holds positions for later."""
    cached = aqtlite.quantize(V, INT8.fwd.lhs, 3)
    wanted = jax.jit(functools.partial(aqtlite.einsum, PV, cfg=nearest()))(P, cached)
    assert_same(jax.jit(einsum)(P, V), wanted)


@pytest.mark.code("quick")
def test_later_values_change_nothing_before():
    later = V.at[:, 5:].mul(100)
    assert_same(jax.jit(einsum)(P, V)[:, :5], jax.jit(einsum)(P, later)[:, :5])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_results_and_gradients_are_near_those_of_floats(dtype):
    p, v = P.astype(dtype), V.astype(dtype)
    floats = functools.partial(jnp.einsum, PV)
    assert relative_error(jax.jit(einsum)(p, v), floats(P, V)) < 0.02
    found = jax.jit(lambda p, v: jax.vjp(einsum, p, v)[1](G.astype(dtype)))(p, v)
    for one, other, x in zip(found, gradients(floats, P, V), (p, v), strict=True):
        assert one.dtype == x.dtype
        assert relative_error(one, other) < 0.03


@pytest.mark.slow
def test_it_is_equal_in_every_program():
    out, found = jax.jit(einsum)(P, V), gradients(einsum, P, V)
    assert_same(einsum(P, V), out)
    mapped = functools.partial(einsum, eqn="hqk,khd->qhd")
    assert_same(jax.jit(jax.vmap(mapped))(P, V), out)
    assert_same(jax.lax.map(lambda pv: mapped(*pv), (P, V)), out)
    for one, other in zip(gradients(jax.checkpoint(einsum), P, V), found, strict=True):
        assert_same(one, other)
    left = config.for_values(nearest(), "lhs")
    swapped = functools.partial(einsum, cfg=left, eqn="bkhd,bhqk->bqhd")
    assert_same(jax.jit(swapped)(V, P), out)


@pytest.mark.code("quick")
def test_all_contractions_are_of_integers():
    lowered = jax.jit(lambda p, v: jax.vjp(einsum, p, v)[1](G)).lower(P, V)
    dots = [line for line in lowered.as_text().splitlines() if "dot_general" in line]
    assert dots
    for line in dots:
        types = line.rpartition(" : ")[2]
        assert "f32" not in types and "i32" in types


# Zeros, and values whose scale would be subnormal, which count as zeros.
NOTHING = 0, 1e-37


@pytest.mark.code("quick")
@pytest.mark.parametrize("nothing", NOTHING)
def test_a_zero_position_does_not_dominate_the_others(nothing):
    """A scale of 1, that of zeros elsewhere, is far above those of small values."""
    small = (1e-3 * V).at[:, 2:4].set(nothing)
    out = jax.jit(einsum)(P, small)
    assert relative_error(out, jnp.einsum(PV, P, small)) < 0.02


@pytest.mark.code("quick")
@pytest.mark.parametrize("factor", [0, 1e-3, 1e3])
def test_gradients_do_not_depend_on_the_size_of_values(factor):
    """Of a value that is small, or zero, or large beside others."""
    values = V.at[:, 0].mul(factor)
    floats = gradients(functools.partial(jnp.einsum, PV), P, values)
    for one, other in zip(gradients(einsum, P, values), floats, strict=True):
        assert relative_error(one, other) < 0.02
        assert relative_error(one[:, :1], other[:, :1]) < 0.03


@pytest.mark.code("quick")
@pytest.mark.parametrize("preset", [INT8, config.for_values(config.qat(8))])
@pytest.mark.parametrize("nothing", NOTHING)
def test_masked_queries_leave_gradients(preset, nothing):
    """Rows of zeros, as of padding, have a scale of 1 elsewhere."""
    p = P.at[:, :, 4:].set(nothing)
    floats = gradients(functools.partial(jnp.einsum, PV), p, V)
    found = gradients(functools.partial(einsum, cfg=preset), p, V)
    for one, other in zip(found, floats, strict=True):
        assert relative_error(one, other) < 0.03


@pytest.mark.code("quick")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_of_zeros_are_trained(dtype):
    """As of a projection that starts at zero."""
    floats = gradients(functools.partial(jnp.einsum, PV), P, 0 * V)
    p, v, g = (x.astype(dtype) for x in (P, 0 * V, G))
    found = jax.jit(lambda p, v: jax.vjp(einsum, p, v)[1](g))(p, v)
    assert not found[0].any()
    assert relative_error(found[1], floats[1]) < 0.03


@pytest.mark.code("quick")
def test_nan_stays_where_it_is_in_floats():
    out = jax.jit(einsum)(P, V.at[0, 6, 1, 2].set(jnp.nan))
    assert jnp.isnan(out[0, :, 1]).all()
    assert jnp.isfinite(out[1]).all() and jnp.isfinite(out[0, :, 0]).all()


@pytest.mark.code("quick")
@pytest.mark.parametrize(
    "grid",
    [
        numerics.IntSymmetric(bits=4),
        numerics.IntAffine(bits=8),
        numerics.Float.from_dtype("float8_e4m3fn"),
        numerics.Float.from_dtype("float4_e2m1fn"),
        numerics.NormalFloat(bits=4),
    ],
    ids=lambda grid: grid.name,
)
def test_any_grid(grid):
    cfg = config.update(INT8, {"fwd.rhs.numerics": grid})
    if grid.zero_point_range is not None:
        cfg = config.update(cfg, {"fwd.rhs.calibration": calibration.MinMax()})
    error = relative_error(
        jax.jit(functools.partial(einsum, cfg=cfg))(P, V), einsum(P, V)
    )
    assert error < 0.2
    found = gradients(functools.partial(einsum, cfg=cfg), P, V)
    assert all(jnp.isfinite(x).all() for x in found)


# --- Configs ----------------------------------------------------------------------


def test_configs_of_values():
    assert INT8.fwd.rhs.calib_shared_axes == "remaining"
    assert INT8.fwd.lhs.calib_shared_axes is None
    assert "per contracted element" in config.describe(INT8)
    assert config.from_json(config.to_json(INT8)) == INT8
    blocks = config.for_values(config.for_activations(config.nvfp4()))
    assert blocks.fwd.rhs.blocks is None and blocks.fwd.rhs.scale_dtype is None
    smoothed = config.for_values(config.smoothquant())
    assert smoothed.fwd.smoothing is None
    assert not INT8.drhs.rhs.use_fwd_quant and INT8.drhs.rhs.is_quantized
    assert INT8.dlhs.rhs.use_fwd_quant
    # Ranges that are known see nothing.
    static = config.for_activations(config.static_int8())
    assert config.for_values(static) == static
    known = config.for_values(config.static_int8())
    assert known.fwd.rhs.calibration == known.fwd.lhs.calibration
    asked = config.update(nearest(), {"fwd.rhs.calib_shared_axes": "per_tensor"})
    assert config.for_values(asked) == asked


REFUSED = {
    "statistics": (
        {"fwd.rhs.calibration": calibration.MaxOverBatches()},
        "found from the array alone",
    ),
    "learned": ({"fwd.rhs.calibration": calibration.LSQ()}, "found from the array"),
    "relative scales": (
        {"fwd.rhs.scale_dtype": "float8_e4m3fn"},
        "depend on one another",
    ),
    "blocks": ({"fwd.rhs.blocks": config.Blocks(size=4)}, "both say what shares"),
    "both": ({"fwd.lhs.calib_shared_axes": "remaining"}, "only one of them"),
    "gradient": ({"dlhs.lhs.calib_shared_axes": "remaining"}, "only fwd.lhs or fwd"),
}


@pytest.mark.parametrize("changes, message", REFUSED.values(), ids=REFUSED)
def test_contradicting_configs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config.update(INT8, changes)


def test_operands_that_cannot_take_scales_are_refused():
    static = config.update(
        INT8,
        {
            "fwd.lhs.calibration": calibration.MaxOverBatches(),
            "fwd.lhs.calib_shared_axes": "per_tensor",
        },
    )
    with pytest.raises(ValueError, match="found without the scale"):
        einsum(P, V, static)
    conv = aqtlite.make_conv_general_dilated(INT8)
    with pytest.raises(ValueError, match="belongs to several elements"):
        conv(normal((1, 4, 8)), normal((3, 4, 2)), (1,), "SAME")


# --- Layers and caches ------------------------------------------------------------

SCORES, VALUES = "...qhd,...khd->...hqk", "...hqk,...khd->...qhd"


@pytest.mark.code("quick")
@pytest.mark.parametrize("preset", [nearest(), config.w4a8(), config.mxfp8()])
def test_einsums_of_flax_know_attention(preset):
    loud = V.at[:, 5:].mul(100)
    run = jax.jit(functools.partial(AqtEinsum(preset), VALUES))
    assert_same(run(P, V)[:, :5], run(P, loud)[:, :5])
    of_nnx = jax.jit(functools.partial(aqtlite.flax.nnx.AqtEinsum(preset), VALUES))
    assert_same(of_nnx(P, V), run(P, V))
    scores = jax.jit(functools.partial(AqtEinsum(preset), SCORES))
    assert_same(scores(V, V)[..., :5, :5], scores(loud, loud)[..., :5, :5])
    spelled = jax.jit(functools.partial(AqtEinsum(preset), PV))
    assert_same(spelled(P, V), run(P, V))
    # An equation of a layer is as configured.
    x, w = normal((2, 8)), normal((8, 3))
    assert_same(
        AqtEinsum(preset)("bk,kn->bn", x, w),
        aqtlite.einsum("bk,kn->bn", x, w, cfg=preset),
    )


@pytest.mark.code("quick")
def test_zeros_in_a_cache_do_not_dominate():
    cfg = config.qat(8)
    keys, values = normal((1, 4, 2, 8)), 1e-3 * normal((1, 4, 2, 8), 1)
    values = values.at[:, 1].set(0)
    query = normal((1, 4, 2, 8), 2)
    found = kv_cache.attend_uncached(query, keys, values, cfg)
    wanted = jax.nn.dot_product_attention(query, keys, values)
    assert relative_error(found, wanted) < 0.03


@pytest.mark.code("quick")
def test_the_layer_of_flax():
    cfg = nearest()
    einsum_cls = functools.partial(AqtEinsum, cfg)
    layer = nn.MultiHeadDotProductAttention(
        num_heads=2,
        qkv_dot_general=AqtDotGeneral(cfg),
        out_dot_general=AqtDotGeneral(cfg),
        qk_attn_weights_einsum_cls=einsum_cls,
        attn_weights_value_einsum_cls=einsum_cls,
    )
    x = normal((2, 8, 8))
    mask = nn.make_causal_mask(x[..., 0])
    variables = init(layer, x)
    run = jax.jit(functools.partial(layer.apply, mask=mask))
    loud = x.at[:, 5:].mul(100)
    first, second = (np.asarray(run(variables, one))[:, :5] for one in (x, loud))
    assert_same(first, second)
