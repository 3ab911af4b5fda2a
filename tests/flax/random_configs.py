"""Random configs of a kind, for random models.

"presets" draws every function of `aqtlite.config` that builds a config, "grids" a grid
for the weights and one, or none, for the activations, "rotated" also a rotation,
"repeated" mostly calibrations with states, for layers that are called twice; the others
are variants of `config.fully_quantized` and `config.weight_only`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from aqtlite import calibration, config, numerics

OneOf = Callable[[Any], Any]
"""Draws one of several values."""


def _integers(one_of: OneOf) -> config.DotGeneral:
    cfg = config.fully_quantized(
        fwd_bits=one_of((8, 8, 8, 4, 2)),
        bwd_bits=one_of((8, 4, None)),
        use_stochastic_rounding=one_of((True, False)),
    )
    if one_of((True, False, False)):
        cfg = config.update(cfg, {"fwd.*.po2_scale": True})
    if one_of((True, False, False)):
        axes = one_of(({"fwd.*": "per_tensor"}, {"fwd.rhs": "per_tensor"}))
        changes = {f"{path}.calib_shared_axes": value for path, value in axes.items()}
        cfg = config.update(cfg, changes)
    return cfg


def _weight_only(one_of: OneOf) -> config.DotGeneral:
    return config.weight_only(bits=one_of((8, 4)))


def _fake_quant(one_of: OneOf) -> config.DotGeneral:
    return config.update(_integers(one_of), {"fwd.*.use_fake_quant": True})


def _dg_in_dtype(one_of: OneOf) -> config.DotGeneral:
    dtype = one_of(("bfloat16", "float32"))
    return config.update(_integers(one_of), {"fwd.dg_in_dtype": dtype})


_STATISTICS = (
    calibration.MovingAverage(),
    calibration.MaxOverBatches(),
    calibration.MeanOverBatches(),
)

_LSQ = (config.lsq, config.lsq_weight_only)

PRESETS: Mapping[str, Callable[[OneOf], config.DotGeneral]] = {
    "block_fp8": lambda one_of: config.block_fp8(one_of((8, 32, 128))),
    "fp8": lambda one_of: config.fp8(
        delayed=one_of((True, False)),
        use_stochastic_rounding=one_of((True, False)),
    ),
    "fully_quantized": _integers,
    "lsq": lambda one_of: one_of(_LSQ)(one_of((2, 4, 8))),
    "mxfp4": lambda one_of: config.mxfp4(may_clip=one_of((True, False))),
    "mxfp6": lambda one_of: config.mxfp6(may_clip=one_of((True, False))),
    "mxfp8": lambda one_of: config.mxfp8(may_clip=one_of((True, False))),
    "mxint8": lambda one_of: config.mxint8(may_clip=one_of((True, False))),
    "nvfp4": lambda one_of: config.nvfp4(),
    "qat": lambda one_of: config.qat(one_of((2, 3, 4, 6, 8))),
    "smoothquant": lambda one_of: config.smoothquant(one_of((0.3, 0.5, 0.8))),
    "static_int8": lambda one_of: config.static_int8(one_of(_STATISTICS)),
    "w4a8": lambda one_of: config.w4a8(bwd_bits=one_of((8, None))),
    "weight_only": lambda one_of: config.weight_only(one_of((1, 2, 3, 4, 5, 8, 12))),
}
"""The presets that quantize, with their options drawn."""


def _presets(one_of: OneOf) -> config.DotGeneral:
    return PRESETS[one_of(tuple(PRESETS))](one_of)


_FLOATS = (
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e3m4",
    "float6_e2m3fn",
    "float6_e3m2fn",
    "float4_e2m1fn",
)
_BLOCKS = (
    None,
    None,
    config.Blocks(size=4, fit=True),
    config.Blocks(size=32, fit=True),
)


def _grid(one_of: OneOf) -> numerics.Numerics:
    kind = one_of(("symmetric", "affine", "normal", "float", "own float"))
    if kind == "symmetric":
        return numerics.IntSymmetric(
            bits=one_of((1, 2, 3, 4, 5, 8, 11)), preserve_max_val=one_of((True, False))
        )
    if kind == "affine":
        return numerics.IntAffine(bits=one_of((2, 3, 4, 8)))
    if kind == "normal":
        return numerics.NormalFloat()
    if kind == "float":
        return numerics.Float.from_dtype(one_of(_FLOATS))
    return numerics.Float(
        exponent_bits=one_of((2, 3, 4)), mantissa_bits=one_of((0, 1, 2, 3))
    )


def _operand(one_of: OneOf) -> config.Tensor:
    grid, blocks = _grid(one_of), one_of(_BLOCKS)
    if grid.zero_point_range is None:
        return config.Tensor(numerics=grid, blocks=blocks)
    how = calibration.MinMax()
    return config.Tensor(numerics=grid, blocks=blocks, calibration=how)


def _grids(one_of: OneOf) -> config.DotGeneral:
    weight = _operand(one_of)
    activation = config.Tensor()
    if one_of((True, False)):
        activation = _operand(one_of)
    return config.DotGeneral(fwd=config.DotGeneralRaw(lhs=activation, rhs=weight))


_ROTATIONS = (
    config.Hadamard(),
    config.Hadamard(size=4, fit=True),
    config.Hadamard(size=12, fit=True),
    config.Hadamard(size=64, fit=True, seed=5),
)


def _rotated(one_of: OneOf) -> config.DotGeneral:
    return config.update(_grids(one_of), {"fwd.rotation": one_of(_ROTATIONS)})


_STATIC_WEIGHTS = {
    "fwd.rhs.calibration": calibration.MaxOverBatches(),
    "fwd.rhs.calib_shared_axes": "per_tensor",
}


def _repeated(one_of: OneOf) -> config.DotGeneral:
    names = ("smoothquant", "smoothquant", "lsq", "lsq", "static_int8", "fp8")
    cfg = PRESETS[one_of(names)](one_of)
    if cfg.fwd.smoothing is None and one_of((True, False, False)):
        cfg = config.update(cfg, _STATIC_WEIGHTS)
    return cfg


CONFIGS: Mapping[str, Callable[[OneOf], config.DotGeneral]] = {
    "integers": _integers,
    "weight_only": _weight_only,
    "fake_quant": _fake_quant,
    "dg_in_dtype": _dg_in_dtype,
    "presets": _presets,
    "grids": _grids,
    "rotated": _rotated,
    "repeated": _repeated,
}
"""A kind of config, and how one is drawn."""
