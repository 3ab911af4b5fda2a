"""Presets: the configs to start from."""

from typing import Any, Literal

import jax.numpy as jnp

from aqtlite import calibration, numerics
from aqtlite.config.dot_general import DotGeneral, DotGeneralRaw
from aqtlite.config.tensor import Tensor
from aqtlite.config.update import update
from aqtlite.numerics import fields


def unquantized() -> DotGeneral:
    """Leaves every contraction in floating point.

    >>> unquantized()
    DotGeneral()
    """
    return DotGeneral()


def weight_only(bits: int = 8) -> DotGeneral:
    """Quantizes the forward's rhs (the weights) and nothing else.

    The contractions run in floating point. The lhs gradient is computed with the
    quantized weights, and is thus the gradient of the served function.

    >>> weight_only(bits=4)
    DotGeneral(
        fwd=DotGeneralRaw(rhs=Tensor(numerics=IntSymmetric(bits=4))),
        dlhs=DotGeneralRaw(rhs=Tensor(use_fwd_quant=True)),
    )

    Args:
        bits: width of the weights, 1 to 16.

    Raises:
        TypeError: if `bits` is not an int.
        ValueError: if `bits` is not from 1 to 16.
    """
    return DotGeneral(
        fwd=DotGeneralRaw(rhs=Tensor(numerics=numerics.IntSymmetric(bits=bits))),
        dlhs=DotGeneralRaw(rhs=Tensor(use_fwd_quant=True)),
    )


def fully_quantized(
    *,
    fwd_bits: int | None = 8,
    bwd_bits: int | None = 8,
    use_fwd_quant: bool = True,
    use_stochastic_rounding: bool = True,
) -> DotGeneral:
    """Quantizes both operands of the forward and of both backward contractions.

    >>> cfg = fully_quantized(fwd_bits=8, bwd_bits=None)
    >>> cfg.fwd.lhs
    Tensor(numerics=IntSymmetric(bits=8))
    >>> cfg.drhs
    DotGeneralRaw(rhs=Tensor(use_fwd_quant=True))

    Args:
        fwd_bits: width in the forward contraction, 1 to 16; None leaves it in floating
            point.
        bwd_bits: width in the backward contractions, 1 to 16; None leaves them in
            floating point.
        use_fwd_quant: reuse the forward's quantized operands in the backward
            contractions (dequantized, in floating-point contractions).
        use_stochastic_rounding: round the output gradient stochastically.

    Raises:
        TypeError: if an argument is of another type than declared.
        ValueError: if a width is not from 1 to 16.
    """
    _check_flags(
        "fully_quantized",
        use_fwd_quant=use_fwd_quant,
        use_stochastic_rounding=use_stochastic_rounding,
    )
    operand = _tensor(fwd_bits)
    gradient = _tensor(bwd_bits, stochastic_rounding=use_stochastic_rounding)
    reused = _tensor(bwd_bits, use_fwd_quant=use_fwd_quant and fwd_bits is not None)
    backward = DotGeneralRaw(lhs=gradient, rhs=reused)
    return DotGeneral(
        fwd=DotGeneralRaw(lhs=operand, rhs=operand), dlhs=backward, drhs=backward
    )


def qat(bits: int = 8) -> DotGeneral:
    """Quantization-aware training: quantized forward operands, gradients in float.

    >>> qat(bits=4) == fully_quantized(fwd_bits=4, bwd_bits=None)
    True

    Args:
        bits: width of both operands.

    Raises:
        TypeError: if `bits` is not an int.
        ValueError: if `bits` is out of the range of `numerics.IntSymmetric`.
    """
    numerics.IntSymmetric(bits=bits)  # None would leave the forward in float.
    return fully_quantized(fwd_bits=bits, bwd_bits=None)


def w4a8(*, bwd_bits: int | None = 8) -> DotGeneral:
    """4-bit weights (the forward's rhs) with 8-bit activations.

    >>> cfg = w4a8()
    >>> cfg.fwd.lhs.numerics.bits, cfg.fwd.rhs.numerics.bits
    (8, 4)

    Args:
        bwd_bits: width of the gradients, as in `fully_quantized`.

    Raises:
        TypeError: if `bwd_bits` is neither an int nor None.
        ValueError: if `bwd_bits` is out of range.
    """
    int4 = {"fwd.rhs.numerics": numerics.IntSymmetric(bits=4)}
    return update(fully_quantized(bwd_bits=bwd_bits), int4)


def fp8(
    *,
    delayed: bool = False,
    per_tensor: bool = False,
    use_stochastic_rounding: bool = False,
    forward: Any = "float8_e4m3fn",
    gradient: Any = "float8_e5m2",
) -> DotGeneral:
    """8-bit floats: e4m3 in the forward contraction, e5m2 for gradients.

    The recipe of Micikevicius et al. 2022, "FP8 Formats for Deep Learning"
    (arXiv:2209.05433), with scales computed at every step, one per row of activations
    and gradients and one per column of weights: no position or example of a batch sees
    another. GPUs contract fp8 operands natively from Ada and MI300 on, and the scales
    multiply the sums; the matrix units of MI300 take the "fnuz" dtypes, which `forward`
    and `gradient` can select.

    >>> cfg = fp8()
    >>> cfg.fwd.rhs.grid.name, cfg.dlhs.lhs.grid.name, cfg.dlhs.rhs.use_fwd_quant
    ('fp8_e4m3', 'fp8_e5m2', True)
    >>> fp8(per_tensor=True).fwd.lhs.calib_shared_axes
    'per_tensor'
    >>> fp8(delayed=True).fwd.lhs.calibration
    DelayedScaling(length=16)

    Args:
        delayed: scale activations (the forward's lhs) and output gradients by earlier
            batches, as in NVIDIA's Transformer Engine (`calibration.DelayedScaling`).
            Weights are still scaled by their current values, so that they can be
            frozen. Statistics are per tensor: the scale of a batch does not depend on
            the batch itself. In Flax, those of gradients are in the collection
            "_overwrite_with_gradient".
        per_tensor: use one scale per tensor, as the paper does. Positions and examples
            of a batch then change each other's results.
        use_stochastic_rounding: round the output gradient stochastically. By default it
            is rounded to nearest, as is usual with fp8.
        forward: dtype of the forward operands.
        gradient: dtype of the output gradient.

    Raises:
        TypeError: if a flag is not a bool.
        ValueError: if a dtype is not a float of 8 bits.
    """
    _check_flags(
        "fp8",
        delayed=delayed,
        per_tensor=per_tensor,
        use_stochastic_rounding=use_stochastic_rounding,
    )
    for name, dtype in (("forward", forward), ("gradient", gradient)):
        try:
            is_float8 = jnp.dtype(dtype).name.startswith("float8_")
        except TypeError:
            is_float8 = False
        if not is_float8:
            raise ValueError(
                f"fp8: {name} must be a float8 dtype such as 'float8_e4m3fn', got "
                f"{dtype!r}"
            )
    grid = numerics.Float.from_dtype(forward)
    shared: Literal["per_tensor"] | None = "per_tensor" if per_tensor else None
    weight = Tensor(numerics=grid, calib_shared_axes=shared)
    of_output = numerics.Float.from_dtype(
        gradient, stochastic_rounding=use_stochastic_rounding
    )
    backward = DotGeneralRaw(
        lhs=Tensor(numerics=of_output, calib_shared_axes=shared),
        rhs=Tensor(use_fwd_quant=True),
    )
    cfg = DotGeneral(
        fwd=DotGeneralRaw(lhs=weight, rhs=weight), dlhs=backward, drhs=backward
    )
    if not delayed:
        return cfg
    changes = {
        "*.lhs.calibration": calibration.DelayedScaling(),
        "*.lhs.calib_shared_axes": "per_tensor",
    }
    return update(cfg, changes)


def _check_flags(preset: str, **flags: bool) -> None:
    for name, flag in flags.items():
        fields.flag(flag, f"{preset}: {name}")


def lsq(bits: int = 4, *, bwd_bits: int | None = 8) -> DotGeneral:
    """Learned step sizes for both forward operands (LSQ, `calibration.LSQ`).

    Activations (the forward's lhs) have one step per tensor, weights one per channel.
    In Flax, `model.init` initializes the steps from the sample batch and the weights,
    and they are trained as parameters.

    >>> lsq(bits=2).fwd.rhs
    Tensor(numerics=IntSymmetric(bits=2, preserve_max_val=True), calibration=LSQ())

    Args:
        bits: width of both operands.
        bwd_bits: width of the gradients, as in `fully_quantized`.

    Raises:
        TypeError: if `bits` is not an int, or `bwd_bits` neither an int nor None.
        ValueError: if a width is out of the range of `numerics.IntSymmetric`.
    """
    grid = numerics.IntSymmetric(bits=bits, preserve_max_val=True)
    changes = {
        "fwd.*.numerics": grid,
        "fwd.*.calibration": calibration.LSQ(),
        "fwd.lhs.calib_shared_axes": "per_tensor",
    }
    return update(fully_quantized(bwd_bits=bwd_bits), changes)


def lsq_weight_only(bits: int = 4) -> DotGeneral:
    """Learned step sizes for the weights (the forward's rhs), and all else in float.

    `weight_only` with the learned scales of LSQ (`calibration.LSQ`, Esser et al. 2020,
    arXiv:1902.08153), one step per channel; activations and gradients stay in float. In
    Flax, `model.init` initializes the steps from the weights, and they are trained as
    parameters. To keep the first and last layers at 8 bits, as in the paper, give them
    separate rules or configs.

    >>> lsq_weight_only(bits=2).fwd
    DotGeneralRaw(
        rhs=Tensor(
            numerics=IntSymmetric(bits=2, preserve_max_val=True),
            calibration=LSQ(),
        ),
    )

    Args:
        bits: width of the weights.

    Raises:
        TypeError: if `bits` is not an int.
        ValueError: if `bits` is out of the range of `numerics.IntSymmetric`.
    """
    grid = numerics.IntSymmetric(bits=bits, preserve_max_val=True)
    changes = {"fwd.rhs.numerics": grid, "fwd.rhs.calibration": calibration.LSQ()}
    return update(weight_only(), changes)


def _tensor(
    bits: int | None, *, stochastic_rounding: bool = False, use_fwd_quant: bool = False
) -> Tensor:
    if bits is None:
        return Tensor(use_fwd_quant=use_fwd_quant)
    grid = numerics.IntSymmetric(
        bits=bits,
        preserve_max_val=stochastic_rounding,
        stochastic_rounding=stochastic_rounding,
    )
    return Tensor(numerics=grid, use_fwd_quant=use_fwd_quant)
