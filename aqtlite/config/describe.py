"""A config as a table for people."""

from collections.abc import Sequence

import numpy as np

from aqtlite import numerics
from aqtlite.config import representation
from aqtlite.config.dot_general import DotGeneral, DotGeneralRaw
from aqtlite.config.tensor import Tensor

_OPERANDS = {
    "fwd.lhs": "lhs",
    "fwd.rhs": "rhs",
    "dlhs.lhs": "gradient",
    "dlhs.rhs": "rhs",
    "drhs.lhs": "gradient",
    "drhs.rhs": "lhs",
}
# What `dlhs.rhs` and `drhs.rhs` take over from the forward.
_FORWARD_SIDE = {"dlhs": "rhs", "drhs": "lhs"}


def describe(cfg: DotGeneral) -> str:
    """A plain-text table of what each contraction does with each of its operands.

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

    The columns: `operand` is the tensor of the forward contraction, or the output
    gradient. `grid` is the number grid and the magnitude onto which the largest value
    is mapped; "fake" marks fake quantization. `scale` says what shares a scale
    ("per-channel": the contracting axes do); "po2" marks power-of-two scales.

    Args:
        cfg: the config.

    Raises:
        TypeError: if `cfg` is not a `DotGeneral`.
    """
    if not isinstance(cfg, DotGeneral):
        raise TypeError(f"describe needs a config.DotGeneral, got {cfg!r}")
    operands = [("path", "operand", "grid", "calibration", "scale", "rounding")]
    contractions = [("contraction", "runs in", "accumulator")]
    for name in ("fwd", "dlhs", "drhs"):
        contraction: DotGeneralRaw = getattr(cfg, name)
        taken = _taken(cfg, name)
        for side in ("lhs", "rhs"):
            path = f"{name}.{side}"
            if side == "rhs" and taken is not None:
                cells = _taken_cells(contraction, taken)
            else:
                cells = _cells(contraction, getattr(contraction, side))
            operands.append((path, _OPERANDS[path], *cells))
        contractions.append((name, *_contraction_cells(contraction, taken)))
    return f"{_table(operands)}\n\n{_table(contractions)}"


def _taken(cfg: DotGeneral, name: str) -> Tensor | None:
    """The forward's Tensor that the contraction `name` takes over, if it does."""
    if name == "fwd" or not getattr(cfg, name).rhs.use_fwd_quant:
        return None
    return getattr(cfg.fwd, _FORWARD_SIDE[name])


def _cells(contraction: DotGeneralRaw, tensor: Tensor) -> tuple[str, str, str, str]:
    """Grid, calibration, scale and rounding of an operand."""
    if isinstance(tensor.numerics, numerics.NoNumerics):
        return "float", "-", "-", "-"
    grid = f"{_grid_name(tensor.numerics)} ±{tensor.numerics.bound:g}"
    if tensor.use_fake_quant:
        grid += " fake"
    arguments = representation.non_default_arguments(tensor.calibration)
    calibration = type(tensor.calibration).__name__
    if arguments:
        calibration += f"({', '.join(str(value) for value in arguments.values())})"
    rounding = "stochastic" if tensor.needs_noise else "nearest"
    return grid, calibration, _scale(contraction, tensor), rounding


def _taken_cells(
    contraction: DotGeneralRaw, taken: Tensor
) -> tuple[str, str, str, str]:
    """As `_cells`, of an operand that is taken over from the forward."""
    if not taken.use_fake_quant:
        return f"fwd's {_grid_name(taken.numerics)}", "-", "-", "-"
    if not contraction.rhs.is_quantized:
        return f"fwd's fake {_grid_name(taken.numerics)}", "-", "-", "-"
    return _cells(contraction, contraction.rhs)


def _scale(contraction: DotGeneralRaw, tensor: Tensor) -> str:
    axes = tensor.calib_shared_axes
    if contraction.local_aqt is not None:
        scale = f"{contraction.local_aqt.contraction_axis_shard_count} tiles"
    elif axes is None:
        scale = "per-channel"
    elif isinstance(axes, str):
        scale = "per-tensor"
    else:
        scale = f"axes {','.join(str(axis) for axis in axes)}"
    return f"{scale} po2" if tensor.po2_scale else scale


def _contraction_cells(
    contraction: DotGeneralRaw, taken: Tensor | None
) -> tuple[str, str]:
    """What a contraction runs in, and its accumulator."""
    rhs = contraction.rhs
    if taken is not None and not taken.use_fake_quant:
        rhs = taken
    integer = [
        tensor.is_quantized and not tensor.use_fake_quant
        for tensor in (contraction.lhs, rhs)
    ]
    runs_in = "integers" if all(integer) else "float"
    is_wide = any(
        tensor.is_quantized and tensor.grid.storage_dtype == np.dtype("int16")
        for tensor in (contraction.lhs, rhs)
    )
    if runs_in == "integers" and is_wide:  # No platform multiplies int16 matrices.
        runs_in = "float32"
    if any(integer) and contraction.dg_in_dtype is not None:
        runs_in = contraction.dg_in_dtype.name
    accumulator = contraction.dg_accumulator_dtype
    if accumulator is not None:
        return runs_in, accumulator.name
    if runs_in == "float" and not any(integer):
        return runs_in, "the output's"
    return runs_in, "int32" if runs_in == "integers" else "float32"


def _grid_name(grid: numerics.Numerics | numerics.NoNumerics) -> str:
    if isinstance(grid, numerics.NoNumerics):
        return "float"
    if isinstance(grid, numerics.IntSymmetric):
        return f"int{grid.bits}"
    return grid.storage_dtype.name


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    )
