"""Hypothesis strategies that make valid configs, of every grid and calibration."""

import dataclasses

import jax.numpy as jnp
from hypothesis import strategies as st

from aqtlite import calibration, config, noise, numerics

_FLOAT_DTYPES = st.sampled_from([None, "float32", "float64", jnp.bfloat16])
_WITHOUT_BFLOAT16 = st.sampled_from([None, "float32", "float64"])
_FLAG = st.booleans()
_PERCENTAGES = st.floats(1, 100, exclude_min=True)


@st.composite
def _int_symmetric(draw):
    bits = draw(st.integers(1, 16))
    stochastic = draw(_FLAG)
    flags = {name: draw(_FLAG) for name in ("clip", "clip_gradient")}
    preserve_max_val = stochastic or draw(_FLAG)
    preserve_zero = draw(st.sampled_from([None, False] if bits == 1 else [None, True]))
    return numerics.IntSymmetric(
        bits=bits,
        preserve_zero=preserve_zero,
        preserve_max_val=preserve_max_val,
        stochastic_rounding=stochastic,
        **flags,
    )


_FLAGS = {"clip_gradient": _FLAG, "stochastic_rounding": _FLAG}
_SYMMETRIC = (
    _int_symmetric()
    | st.builds(
        numerics.Float,
        exponent_bits=st.integers(2, 5),
        mantissa_bits=st.integers(1, 10),
        special_values=st.sampled_from([None, "none", "ieee"]),
        **_FLAGS,
    )
    | st.builds(numerics.NormalFloat, **_FLAGS)
)
_AFFINE = st.builds(
    numerics.IntAffine,
    bits=st.integers(3, 8),
    signed=_FLAG,
    narrow_range=_FLAG,
    **_FLAGS,
)

_FACTORS = st.floats(1e-3, 10)
_DECAYS = st.floats(0, 1, width=32, allow_subnormal=False)
_SCALES = st.none() | _FACTORS
_FRACTIONS = st.lists(st.floats(0.1, 1), min_size=1, max_size=4)
_OF_ANY_GRID = (
    st.builds(calibration.Percentile, _PERCENTAGES)
    | st.builds(calibration.MseSearch, _FRACTIONS)
    | st.builds(calibration.SnrSearch, _FRACTIONS)
)
_OF_SYMMETRIC_GRIDS = (
    st.builds(calibration.AbsMax, clipping_scale=_SCALES)
    | st.builds(calibration.AbsMean, p=st.floats(1, 4), clipping_scale=_SCALES)
    | st.builds(calibration.RMS, _FACTORS)
    | st.builds(calibration.Constant, _FACTORS)
    | st.builds(calibration.OverflowAware)
    | st.builds(calibration.RoundedScale, dtype=st.just("float8_e5m2"))
    | _OF_ANY_GRID
)
_OF_AFFINE_GRIDS = (
    st.builds(calibration.MinMax, clipping_scale=_SCALES)
    | st.builds(
        calibration.ConstantRange,
        min=st.just(0.0) | st.floats(-9, -1e-3),
        max=st.floats(0.1, 9),
    )
    | _OF_ANY_GRID
)


def calibrations(affine=False):
    """Calibrations by the values of an array."""
    return _OF_AFFINE_GRIDS if affine else _OF_SYMMETRIC_GRIDS


def _calibrations_over_batches(affine):
    of = calibrations(affine)
    over = (
        st.builds(calibration.MaxOverBatches, of=of)
        | st.builds(calibration.MeanOverBatches, of=of)
        | st.builds(calibration.MovingAverage, of=of, decay=st.floats(0.1, 0.99))
    )
    symmetric = (
        st.builds(calibration.DelayedScaling, length=st.integers(1, 20))
        | st.builds(calibration.PercentileOverBatches, _PERCENTAGES)
        | st.builds(calibration.MseOverBatches, st.just((1.0, 0.5)))
        | st.builds(
            calibration.WeightedDeviations, l1_coeff=_FACTORS, p=st.floats(1, 4)
        )
    )
    return over if affine else over | symmetric


def _learned(affine):
    gradient_scale = st.none() | _FACTORS
    if affine:
        return st.builds(calibration.LSQPlus, gradient_scale=gradient_scale)
    return st.builds(calibration.LSQ, gradient_scale=gradient_scale)


_AXES = st.lists(st.integers(-4, 4), min_size=1, unique=True)


@st.composite
def tensors(draw, forward=False, use_fwd_quant=False, tiled=False):
    affine = draw(_FLAG)
    how = calibrations(affine)
    if forward:
        how |= _calibrations_over_batches(affine) | _learned(affine)
    always = {
        "calibration": draw(how),
        "scale_stop_grad": draw(_FLAG),
        "use_fwd_quant": use_fwd_quant,
        "noise": draw(st.sampled_from([noise.CounterHash(), noise.JaxRandom()])),
    }
    if draw(_FLAG):
        return config.Tensor(**always)
    grid = draw(_AFFINE if affine else _SYMMETRIC)
    if affine and always["calibration"].is_learned:
        grid = grid.to_nearest()
    own_axes = {}
    po2_scale = draw(_FLAG)
    dtypes = [None, "float8_e8m0fnu", "bfloat16", "float8_e4m3fn"]
    scale_dtype = draw(st.sampled_from(dtypes))
    if po2_scale and scale_dtype in ("bfloat16", "float8_e4m3fn"):
        scale_dtype = None
    if not tiled and not always["calibration"].has_state and draw(_FLAG):
        own_axes["blocks"] = config.Blocks(
            size=draw(st.integers(1, 64)),
            remaining_size=draw(st.integers(1, 9)),
            span_others=draw(_FLAG),
        )
    elif not tiled:
        own_axes["calib_shared_axes"] = draw(st.none() | st.just("per_tensor") | _AXES)
        if grid.needs_noise:
            own_axes["noise_shared_axes"] = draw(st.none() | _AXES)
    if scale_dtype == "float8_e4m3fn" and ("blocks" not in own_axes or draw(_FLAG)):
        own_axes["scale_shared_axes"] = "per_tensor"
    return config.Tensor(
        numerics=grid,
        po2_scale=po2_scale,
        find_nan=draw(_FLAG),
        scale_dtype=scale_dtype,
        use_fake_quant=draw(_FLAG),
        **own_axes,
        **always,
    )


def _bfloat16_holds(tensor):
    return not tensor.is_integer or tensor.grid.largest_stored <= 2**8


@st.composite
def contractions(draw, backward=False, reuse=False):
    tiles = backward and draw(_FLAG)
    lhs = draw(tensors(forward=not backward, tiled=tiles))
    rhs = draw(
        tensors(forward=not backward, use_fwd_quant=reuse and draw(_FLAG), tiled=tiles)
    )
    if not backward and rhs.is_quantized and draw(_FLAG):
        sparsity = config.NofM(draw(st.integers(1, 3)), 4, decay=draw(_DECAYS))
        rhs = dataclasses.replace(rhs, sparsity=sparsity)
    is_rhs_quantized = rhs.is_quantized and not rhs.use_fwd_quant
    smoothing = None
    is_quantized = lhs.is_quantized or rhs.is_quantized
    if not backward and is_quantized and draw(_FLAG):
        smoothing = config.Smoothing(lhs_exponent=draw(st.floats(0.1, 1)))
    rotation = None
    if is_quantized and not rhs.use_fwd_quant and draw(_FLAG):
        rotation = config.Hadamard(size=draw(st.sampled_from([None, 12, 16])))
    tiles = tiles and (lhs.is_quantized or is_rhs_quantized)
    any_dtype = _bfloat16_holds(lhs) and _bfloat16_holds(rhs)
    return config.DotGeneralRaw(
        lhs=lhs,
        rhs=rhs,
        dg_in_dtype=draw(_FLOAT_DTYPES if any_dtype else _WITHOUT_BFLOAT16),
        dg_accumulator_dtype=draw(_FLOAT_DTYPES),
        smoothing=smoothing,
        rotation=rotation,
        local_aqt=config.LocalAqt(contraction_axis_shard_count=draw(st.integers(1, 9)))
        if tiles
        else None,
    )


@st.composite
def dot_generals(draw):
    fwd = draw(contractions())
    return config.DotGeneral(
        out=draw(tensors()).to_nearest(),
        fwd=fwd,
        dlhs=draw(contractions(backward=True, reuse=fwd.rhs.is_quantized)),
        drhs=draw(contractions(backward=True, reuse=fwd.lhs.is_quantized)),
    )
