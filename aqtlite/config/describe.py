"""Description of a config as tables."""

import dataclasses

from aqtlite import calibration as calibrations
from aqtlite import noise, numerics
from aqtlite.calibration import scale_grids
from aqtlite.config import arithmetic, representation
from aqtlite.config.dot_general import DotGeneral, DotGeneralRaw
from aqtlite.config.rotation import Hadamard
from aqtlite.config.smoothing import Smoothing
from aqtlite.config.tensor import Tensor
from aqtlite.output.tables import Rows, Tables

_OPERANDS = {
    "fwd.lhs": "lhs",
    "fwd.rhs": "rhs",
    "dlhs.lhs": "gradient",
    "dlhs.rhs": "rhs",
    "drhs.lhs": "gradient",
    "drhs.rhs": "lhs",
}
# `dlhs.rhs` and `drhs.rhs` are the forward's rhs and lhs.


def describe(cfg: DotGeneral) -> Tables:
    """Describes how each contraction quantizes each operand, as tables.

    >>> from aqtlite import config
    >>> print(describe(config.fully_quantized(fwd_bits=8, bwd_bits=4)))
    path      operand   grid         calibration  scale        rounding
    fwd.lhs   lhs       int8 ±127.5  AbsMax       per-channel  nearest
    fwd.rhs   rhs       int8 ±127.5  AbsMax       per-channel  nearest
    dlhs.lhs  gradient  int4 ±7      AbsMax       per-channel  stochastic
    dlhs.rhs  rhs       fwd's int8   -            -            -
    drhs.lhs  gradient  int4 ±7      AbsMax       per-channel  stochastic
    drhs.rhs  lhs       fwd's int8   -            -            -
    <BLANKLINE>
    contraction  runs in   accumulator
    fwd          integers  int32
    dlhs         integers  int32
    drhs         integers  int32

    The columns:

    - `operand`: a tensor of the forward contraction, or the output gradient.
    - `grid`: number grid, with the magnitude onto which the largest value is mapped.
      "fake" marks fake quantization, and "fwd's" a backward operand that reuses the
      forward's quantized values. If the scale cannot move onto the gradient (it can if
      it is shared along contracting axes), the grid of the dequantized operand follows.
      "2:4 sparse": of 4 weights, 2 are kept (`NofM`).
    - `scale`: axes that share a scale ("per-channel": the contracting axes; "per-row",
      for a result: the last axis; "per contracted element": the remaining axes, and
      the scale multiplies the other operand); "po2" marks power-of-two scales.
    - `rounding`: for stochastic rounding, also the noise source if it is not the
      default, and the axes that share noise. Serving rounds forward operands to
      nearest.

    With smoothing, a further table has the scale that divides lhs and multiplies rhs;
    with rotations, one has the channels that they mix.

    Args:
        cfg: config to describe.

    Returns:
        A `str`, which notebooks show as tables.

    Raises:
        TypeError: if `cfg` is not a `DotGeneral`.
    """
    if not isinstance(cfg, DotGeneral):
        raise TypeError(f"describe needs a config.DotGeneral, got {cfg!r}")
    operands = [("path", "operand", "grid", "calibration", "scale", "rounding")]
    contractions = [("contraction", "runs in", "accumulator")]
    for name in ("fwd", "dlhs", "drhs"):
        contraction: DotGeneralRaw = getattr(cfg, name)
        reused = arithmetic.reused_rhs(cfg, name)
        rhs = contraction.rhs if reused is None else reused[1]
        for side in ("lhs", "rhs"):
            path = f"{name}.{side}"
            is_forward = name == "fwd"
            if side == "rhs" and reused is not None:
                cells = _reused_cells(cfg, name, *reused)
            else:
                cells = _cells(contraction, getattr(contraction, side), is_forward)
            operands.append((path, _OPERANDS[path], *cells))
        contractions.append((name, *_contraction_cells(contraction, rhs)))
    if cfg.out.is_quantized:
        operands.append(("out", "result", *_cells(cfg.fwd, cfg.out, False, "per-row")))
    tables: list[Rows] = [operands, contractions]
    if cfg.fwd.smoothing is not None:
        tables.append([("smoothing", "scale"), ("fwd", _smoothing(cfg.fwd.smoothing))])
    rotations = [
        (name, _rotation(how))
        for name in ("fwd", "dlhs", "drhs")
        if (how := getattr(cfg, name).rotation) is not None
    ]
    if rotations:
        tables.append([("rotation", "mixes"), *rotations])
    return Tables(tables)


def _reused_cells(
    cfg: DotGeneral, name: str, reuse: arithmetic.Reuse, rhs: Tensor
) -> tuple[str, str, str, str]:
    """`_cells` for an operand that the forward contraction quantized."""
    forward: Tensor = getattr(cfg.fwd, arithmetic.FORWARD_SIDE[name])
    if reuse == "dequantized" and rhs.is_quantized:
        grid, found, scale, rounding = _cells(getattr(cfg, name), rhs, False)
        return f"fwd's {forward.grid.name}, {grid}", found, scale, rounding
    fake = "fake " if rhs.use_fake_quant else ""
    return f"fwd's {fake}{forward.grid.name}", "-", "-", "-"


def _cells(
    contraction: DotGeneralRaw,
    tensor: Tensor,
    is_forward: bool,
    default: str = "per-channel",
) -> tuple[str, str, str, str]:
    """Grid, calibration, scale and rounding of an operand, or of the result."""
    if isinstance(tensor.numerics, numerics.NoNumerics):
        return "float", "-", "-", "-"
    if tensor.numerics.zero_point_range is None:
        grid = f"{tensor.numerics.name} ±{tensor.numerics.bound:g}"
    else:
        smallest, largest = tensor.numerics.zero_point_range
        grid = f"{tensor.numerics.name} {smallest}..{largest}"
    if tensor.use_fake_quant:
        grid += " fake"
    if tensor.sparsity is not None:
        grid += f", {tensor.sparsity} sparse"
    calibration = _calibration(tensor.calibration)
    scale = _scale(contraction, tensor, default)
    if tensor.double_scales is not None:
        scale += ", in 8 bits when frozen"
    return grid, calibration, scale, _rounding(tensor, is_forward)


def _rounding(tensor: Tensor, is_forward: bool) -> str:
    if tensor.rounding is not None:
        nearest = _rounding(dataclasses.replace(tensor, rounding=None), is_forward)
        return f"{nearest}, by GPTQ at conversion"
    if not tensor.needs_noise:
        return "nearest"
    words = ["stochastic"]
    if tensor.noise != noise.CounterHash():
        words.append(type(tensor.noise).__name__)
    if tensor.noise_shared_axes is not None:
        shared = ",".join(map(str, tensor.noise_shared_axes))
        words.append(f"shared along {shared}")
    if is_forward:
        words.append("served nearest")
    return ", ".join(words)


def _calibration(calibration: calibrations.Calibration) -> str:
    arguments = representation.non_default_arguments(calibration)
    name = type(calibration).__name__
    if not arguments:
        return name
    return f"{name}({', '.join(str(value) for value in arguments.values())})"


def _smoothing(smoothing: Smoothing) -> str:
    lhs, rhs = (
        f"{_calibration(of)}({side})^{exponent:g}" if exponent else "1"
        for side, of, exponent in (
            ("lhs", smoothing.lhs_calibration, smoothing.lhs_exponent),
            ("rhs", smoothing.rhs_calibration, smoothing.rhs_exponent),
        )
    )
    scale = lhs if rhs == "1" else f"{lhs} / {rhs}"
    return f"{scale} po2" if smoothing.po2_scale else scale


def _rotation(how: Hadamard) -> str:
    mixed = "all channels"
    if how.size is not None:
        mixed = f"blocks of {'up to ' if how.fit else ''}{how.size} channels"
    return f"{mixed}, seed {how.seed}" if how.seed else mixed


def _scale(contraction: DotGeneralRaw, tensor: Tensor, default: str) -> str:
    axes = tensor.calib_shared_axes
    if contraction.local_aqt is not None:
        scale = f"{contraction.local_aqt.contraction_axis_shard_count} tiles"
    elif tensor.blocks is not None:
        scale = f"blocks {tensor.blocks}"
    elif axes is None:
        scale = default
    elif axes == "remaining":
        scale = "per contracted element"
    elif isinstance(axes, str):
        scale = "per-tensor"
    else:
        scale = f"axes {','.join(str(axis) for axis in axes)}"
    if tensor.scale_dtype is not None:
        scale = f"{scale} {tensor.scale_dtype.name.removeprefix('float8_')}"
        if tensor.scale_dtype.name in scale_grids.RELATIVE_DTYPES:
            whole = "tensor" if tensor.scale_shared_axes == "per_tensor" else "row"
            scale = f"{scale} x float32 per {whole}"
    return f"{scale} po2" if tensor.po2_scale else scale


def _contraction_cells(raw: DotGeneralRaw, rhs: Tensor) -> tuple[str, str]:
    """The dtype or kind of arithmetic of a contraction, and the accumulator dtype."""
    forms = arithmetic.forms_of(raw.lhs, rhs, raw.dg_in_dtype)
    kind = arithmetic.kind_of(*forms, raw.dg_in_dtype)
    runs_in = {"integers": "integers", "narrow": "float8"}.get(kind, "float")
    if raw.dg_in_dtype is not None and forms != ("float", "float"):
        runs_in = raw.dg_in_dtype.name
    if raw.dg_accumulator_dtype is not None:
        return runs_in, raw.dg_accumulator_dtype.name
    return runs_in, "int32" if kind == "integers" else "float32"
