"""Quantization of one array outside of a contraction."""

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from aqtlite import config, noise
from aqtlite.operations import OperandAxes
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization import checks, granularity, quantizer
from aqtlite.quantization.preparation import padding, sparsity
from aqtlite.quantization.seeds import Seeds


def quantize(
    x: Any,
    tensor_config: config.Tensor,
    axes: int | Sequence[int],
    key: jax.Array | None = None,
    *,
    window: Sequence[int] = (),
) -> QTensor:
    """Quantizes an array.

    Args:
        x: float32, bfloat16, float16 or float64, any shape.
        tensor_config: the grid, the calibration and the granularity.
        axes: the contracting axes, which share a scale unless
            ``tensor_config.calib_shared_axes`` says otherwise.
        key: a `jax.random` key for stochastic rounding. Without one, the noise of each
            channel is seeded from the bits of the bound that calibration found.
        window: the `axes` that are the window of a convolution;
            ``tensor_config.blocks`` does not cut them.

    Returns:
        A `QTensor` of the shape of `x`; its scale is float32, with size 1 along the
        axes that share one. A channel of zeros has scale 1, or 0 on a grid without
        zero. A NaN or an infinity makes the scale of its channel NaN, so that the whole
        channel dequantizes to NaN, as it would poison a float contraction. Neither
        holds for `calibration.Constant` and `calibration.ConstantRange`, which do not
        look at the array.

    Raises:
        TypeError: if `x` is no array or not floating, or `tensor_config` not a
            `config.Tensor`.
        ValueError: if the config does not quantize, or an axis is out of range.

    >>> import jax.numpy as jnp
    >>> from aqtlite import numerics
    >>> int4 = config.Tensor(numerics=numerics.IntSymmetric(bits=4))
    >>> quantize(jnp.array([3.0, -1.5, 0.1]), int4, 0).qvalue.tolist()
    [7, -4, 0]
    """
    if not isinstance(tensor_config, config.Tensor):
        raise TypeError(
            f"tensor_config must be a config.Tensor, got {type(tensor_config).__name__}"
        )
    _ = tensor_config.grid  # Raises ValueError if the config does not quantize.
    if isinstance(x, QTensor):
        raise TypeError("quantize takes a float array, and x is a QTensor; dequant it")
    x = checks.as_array(x, "x")
    checks.check_floating(x, "x")
    try:
        sequence = axes if isinstance(axes, Iterable) else (axes,)
        contracting = tuple(operator.index(axis) for axis in sequence)
    except TypeError as error:
        raise TypeError(
            f"axes must be an int or a sequence of ints, got {axes!r}"
        ) from error
    seed = None if key is None else noise.seed_from_key(key)
    contracting = granularity.normalize_axes(contracting, x.shape, "axes")
    of_x = OperandAxes.of_contracting(x.ndim, contracting)
    of_x = of_x._replace(window=_window(window, contracting, x.shape))
    if tensor_config.calibration.has_state:
        raise ValueError(
            f"tensor_config.calibration={tensor_config.calibration!r} needs statistics "
            "of several batches; quantize with calibration.AbsMax() or another that "
            "looks at the array alone"
        )
    if tensor_config.calibration.is_learned:
        raise ValueError(
            f"tensor_config.calibration={tensor_config.calibration!r} is learned, and "
            "its parameters are trained in a contraction; quantize with "
            "calibration.AbsMax() or another that looks at the array alone"
        )
    x = sparsity.prune(x, tensor_config, of_x, "tensor_config")
    given, x = x, padding.pad_array(x, tensor_config, of_x, "tensor_config")
    seeds = Seeds(seed)
    q = quantizer.quantize_array(x, tensor_config, of_x, "tensor_config", seeds)
    return dataclasses.replace(q, padding=padding.widths(x, like=given))


def _window(
    window: Sequence[int], contracting: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[int, ...]:
    """Returns the axes of a window, counted from the front.

    Raises:
        ValueError: if an axis is not contracted.
    """
    found = granularity.normalize_axes(tuple(window), shape, "window")
    if not set(found) <= set(contracting):
        raise ValueError(
            f"window={tuple(window)} must be some of axes={contracting}, the "
            f"contracting axes of x, of shape {shape}"
        )
    return found
