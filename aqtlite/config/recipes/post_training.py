"""Presets for trained models, which need statistics of their activations."""

from typing import Any, Literal

from aqtlite import calibration, numerics
from aqtlite.config.blocks import Blocks
from aqtlite.config.dot_general import DotGeneral
from aqtlite.config.recipes.training import fully_quantized, weight_only
from aqtlite.config.rounding import Gptq
from aqtlite.config.smoothing import Smoothing
from aqtlite.config.update import update
from aqtlite.numerics import fields

_MAX_OVER_BATCHES = calibration.MaxOverBatches()

Statistic = Literal["moving_average", "max", "percentile", "mse"]
"""Names of statistics that give a range."""


def gptq(bits: int = 4, size: int = 128) -> DotGeneral:
    """Weights of few bits, rounded by GPTQ at conversion, and all else in float.

    Frantar et al. 2022, arXiv:2210.17323 (`Gptq`), on a grid with a zero point, with a
    range for each `size` inputs and output: from the smallest to the largest weight.
    Conversion needs statistics of the activations, gathered by
    `aqtlite.flax.calibrate_in_float`. For models that are trained already: until they
    are converted, weights are rounded to nearest.

    >>> gptq(bits=3).fwd.rhs
    Tensor(
        numerics=IntAffine(bits=3),
        calibration=MinMax(),
        blocks=Blocks(size=128, fit=True),
        rounding=Gptq(),
    )

    Args:
        bits: width of the weights.
        size: number of inputs that share a scale; smaller where it does not divide
            their number.

    Raises:
        TypeError: if an argument is not an int.
        ValueError: if `bits` is out of the range of `numerics.IntAffine`, or `size` is
            below 1.
    """
    if size is None:
        raise TypeError(
            "gptq.size must be an int, got None; for one scale for all inputs of an "
            'output, config.update(config.gptq(), {"fwd.rhs.blocks": None})'
        )
    changes = {
        "fwd.rhs.numerics": numerics.IntAffine(bits=bits),
        "fwd.rhs.calibration": calibration.MinMax(),
        "fwd.rhs.blocks": Blocks(size=size, fit=True),
        "fwd.rhs.rounding": Gptq(),
    }
    return update(weight_only(), changes)


def static_int8(
    statistic: calibration.Calibration | Statistic = "moving_average",
    *,
    affine: bool = False,
    bwd_bits: int | None = 8,
) -> DotGeneral:
    """8 bits, with a static range for activations (the forward's lhs).

    There is one range per tensor, gathered in training or by `aqtlite.flax.calibrate`,
    so serving computes no reduction over activations. Weights keep per-channel scales.

    >>> static_int8("percentile").fwd.lhs.calibration
    PercentileOverBatches(percentage=99.99, mantissa_bits=5)
    >>> static_int8("max", affine=True).fwd.lhs
    Tensor(
        numerics=IntAffine(),
        calib_shared_axes='per_tensor',
        calibration=MaxOverBatches(of=MinMax()),
    )

    Args:
        statistic: statistic that gives the range. "moving_average": the exponential
            moving average of the batches' ranges. "max": the widest of them.
            "percentile": what 99.99 percent of all elements do not exceed. "mse": the
            range with the least squared error. Or a calibration that gathers
            statistics, for other parameters.
        affine: quantize activations with a zero point: a range that is not symmetric,
            as after a ReLU, is covered with twice the resolution. A calibration given
            as `statistic` has to be for such grids.
        bwd_bits: width of the gradients, as in `fully_quantized`.

    Raises:
        TypeError: if `statistic` is neither a calibration nor a str, or `affine` not a
            bool.
        ValueError: if `statistic` is another name, or gathers no statistics.
    """
    fields.flag(affine, "static_int8: affine")
    changes = {
        "fwd.lhs.calibration": _gathered(statistic, affine),
        "fwd.lhs.calib_shared_axes": "per_tensor",
    }
    if affine:
        changes["fwd.lhs.numerics"] = numerics.IntAffine(bits=8)
    return update(fully_quantized(bwd_bits=bwd_bits), changes)


def _gathered(statistic: Any, affine: bool) -> calibration.Calibration:
    """The calibration with a name, or the one that was given."""
    ends = calibration.MinMax() if affine else calibration.AbsMax()
    named: dict[str, calibration.Calibration] = {
        "moving_average": calibration.MovingAverage(of=ends),
        "max": calibration.MaxOverBatches(of=ends),
        "percentile": calibration.PercentileOverBatches(),
        "mse": calibration.MseOverBatches(),
    }
    if isinstance(statistic, str):
        if statistic not in named:
            raise ValueError(
                f"static_int8: statistic must be one of {', '.join(named)} or a "
                f"calibration, got {statistic!r}"
            )
        return named[statistic]
    if not isinstance(statistic, calibration.Calibration):
        raise TypeError(
            "static_int8 takes a calibration such as calibration.MovingAverage(), or a "
            f"name such as 'percentile', got {statistic!r}"
        )
    if not statistic.has_state:
        raise ValueError(
            f"static_int8: {statistic!r} gathers no statistics; take one such as "
            "calibration.MovingAverage()"
        )
    return statistic


def smoothquant(
    alpha: float = 0.5,
    statistic: calibration.Calibration = _MAX_OVER_BATCHES,
    *,
    bwd_bits: int | None = 8,
) -> DotGeneral:
    """8 bits, with activation outliers moved into the weights (SmoothQuant).

    Xiao et al. 2023, arXiv:2211.10438. The smoothing scales come from statistics of the
    activations (the forward's lhs), gathered in training or by
    `aqtlite.flax.calibrate`; conversion folds them into the frozen weights.

    >>> smoothquant(0.75).fwd.smoothing.rhs_exponent
    0.25

    Args:
        alpha: migration strength, above 0 and at most 1: how much of the spread of
            activation channels moves into the weights.
        statistic: calibration that finds the magnitude of each activation channel.
        bwd_bits: width of the gradients, as in `fully_quantized`.

    Raises:
        TypeError: if `alpha` is not a number, or `statistic` not a calibration.
        ValueError: if `alpha` is not from 0 to 1, 0 excluded, or `statistic` gathers
            no statistics.
    """
    fields.number(alpha, "smoothquant: alpha")
    smoothing = Smoothing(
        lhs_exponent=alpha, rhs_exponent=1 - alpha, lhs_calibration=statistic
    )
    if not statistic.has_state:
        raise ValueError(
            f"smoothquant: {statistic!r} gathers no statistics; take one such as "
            "calibration.MaxOverBatches()"
        )
    return update(fully_quantized(bwd_bits=bwd_bits), {"fwd.smoothing": smoothing})
