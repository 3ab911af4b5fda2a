"""Hypothesis strategies that make valid configs."""

import jax.numpy as jnp
from hypothesis import strategies as st

from aqtlite import calibration, config, numerics

_FLOAT_DTYPES = st.sampled_from([None, "float32", "float64", jnp.bfloat16])


@st.composite
def grids(draw, noise=False):
    bits = draw(st.integers(1, 8))
    stochastic = noise and draw(st.booleans())
    flags = {name: draw(st.booleans()) for name in ("clip", "clip_gradient")}
    preserve_max_val = stochastic or draw(st.booleans())
    preserve_zero = draw(st.sampled_from([None, False] if bits == 1 else [None, True]))
    return numerics.IntSymmetric(
        bits=bits,
        preserve_zero=preserve_zero,
        preserve_max_val=preserve_max_val,
        stochastic_rounding=stochastic,
        **flags,
    )


def calibrations():
    scales = st.none() | st.floats(1e-3, 10)
    return scales.map(lambda scale: calibration.AbsMax(clipping_scale=scale))


@st.composite
def tensors(draw, noise=False, use_fwd_quant=False, own_axes=True):
    always = {
        "calibration": draw(calibrations()),
        "scale_stop_grad": draw(st.booleans()),
        "use_fwd_quant": use_fwd_quant,
    }
    if draw(st.booleans()):
        return config.Tensor(**always)
    axes = st.lists(st.integers(-4, 4), min_size=1, unique=True)
    return config.Tensor(
        numerics=draw(grids(noise=noise)),
        calib_shared_axes=draw(st.none() | st.just("per_tensor") | axes)
        if own_axes
        else None,
        po2_scale=draw(st.booleans()),
        use_fake_quant=draw(st.booleans()),
        **always,
    )


@st.composite
def contractions(draw, backward=False, reuse=False):
    tiles = backward and draw(st.booleans())
    lhs = draw(tensors(noise=backward, own_axes=not tiles))
    rhs = draw(tensors(use_fwd_quant=reuse and draw(st.booleans()), own_axes=not tiles))
    is_rhs_quantized = rhs.is_quantized and not rhs.use_fwd_quant
    tiles = tiles and (lhs.is_quantized or is_rhs_quantized)
    return config.DotGeneralRaw(
        lhs=lhs,
        rhs=rhs,
        dg_in_dtype=draw(_FLOAT_DTYPES),
        dg_accumulator_dtype=draw(_FLOAT_DTYPES),
        local_aqt=config.LocalAqt(contraction_axis_shard_count=draw(st.integers(1, 9)))
        if tiles
        else None,
    )


@st.composite
def dot_generals(draw):
    fwd = draw(contractions())
    return config.DotGeneral(
        out=draw(tensors()),
        fwd=fwd,
        dlhs=draw(contractions(backward=True, reuse=fwd.rhs.is_quantized)),
        drhs=draw(contractions(backward=True, reuse=fwd.lhs.is_quantized)),
    )
