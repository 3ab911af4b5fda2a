"""Folds BatchNorms into the layers before them, ahead of conversion."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import core as flax_core
from flax import linen as nn
from flax.core.meta import unbox

from aqtlite import errors
from aqtlite.flax.linen.frozen_kernel import FrozenKernel
from aqtlite.flax.linen.tools import kernels


def fold_batch_norm(
    variables: Mapping[str, Any], layers: Mapping[str, str], *, epsilon: float = 1e-5
) -> dict[str, Any]:
    """Folds trained BatchNorms into the layers before them.

    ``(conv(x, kernel) + bias - mean) * factor + beta``, where ``factor = scale /
    sqrt(var + epsilon)``, is a convolution with ``kernel * factor``. The BatchNorm
    becomes the identity, so that the model itself does not change; if the layer has no
    bias, the BatchNorm still adds one. `convert` then freezes the folded kernel: with
    per-channel scales it has the same integers, and scales multiplied by `factor`.

    The float model's results change only by float rounding; the quantized model's also
    by the effect on the rounding of later activations.

    Args:
        variables: trained variables of the model, with the collection "batch_stats";
            they are not modified.
        layers: mapping from the path of each BatchNorm, such as
            ``"Block_0/BatchNorm_0"``, to that of the `nn.Conv` or `nn.Dense` before it.
            The BatchNorm must take the layer's result *directly*, and normalize along
            the last axis of the kernel. An activation between them, another use of the
            result, ``axis=`` and ``transpose_kernel=`` are not detected, nor is a
            BatchNorm or a layer that the model calls in several places: the others
            would lose or gain its factor. Compare the model's outputs before and after.
        epsilon: epsilon of the BatchNorms, from 0 to 1.

    Returns:
        The changed variables, for calls with ``use_running_average=True``.

    Raises:
        TypeError: if `layers` is not a mapping of paths.
        ValueError: if there is no such layer or BatchNorm, if two BatchNorms name one
            layer, if shapes do not fit, if the kernel is frozen or normalized
            (`nn.WeightNorm`, `nn.SpectralNorm`) or has an adapter, if the scale of the
            kernel or the result is learned or computed from statistics, or if
            `epsilon` is not from 0 to 1.

    >>> import flax.linen as nn
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from aqtlite import config
    >>> from aqtlite.flax import AqtConvGeneralDilated, convert
    >>> conv = nn.Conv(4, (3,), conv_general_dilated=AqtConvGeneralDilated(
    ...     config.fully_quantized()))
    >>> model = nn.Sequential([conv, nn.BatchNorm(use_running_average=True)])
    >>> x = jnp.linspace(-1, 1, 24).reshape(2, 6, 2)
    >>> variables = model.init(jax.random.key(0), x)
    >>> folded = fold_batch_norm(variables, {"layers_1": "layers_0"})
    >>> serving = convert(model, folded, x)
    >>> error = model.apply(serving, x) - model.apply(variables, x)
    >>> bool(jnp.abs(error).max() < 1e-5)
    True
    """
    if not isinstance(layers, Mapping) or not all(
        isinstance(path, str) for pair in layers.items() for path in pair
    ):
        raise TypeError(
            "fold_batch_norm takes a mapping from the path of each BatchNorm to that "
            f"of the layer in front of it, got {errors.brief(layers)}"
        )
    if len(set(layers.values())) < len(layers):
        raise ValueError(f"layers={dict(layers)} names a layer twice")
    if not 0 <= epsilon <= 1:
        raise ValueError(
            f"epsilon={epsilon} has to be from 0 to 1, that of the BatchNorms"
        )
    changed = {name: flax_core.unfreeze(value) for name, value in variables.items()}
    for norm, layer in layers.items():
        _fold(changed, norm, layer, np.float32(epsilon))
    return changed


def _fold(
    variables: dict[str, Any], norm: str, layer: str, epsilon: np.float32
) -> None:
    statistics = kernels.at(variables.get("batch_stats", {}), norm)
    if not isinstance(statistics, dict) or set(statistics) != {"mean", "var"}:
        raise ValueError(
            f"{norm!r} has no running mean and variance in variables['batch_stats']: "
            "it is no BatchNorm, or the variables are without their statistics"
        )
    params = kernels.at(variables.get("params", {}), layer)
    _check(variables, params, layer)
    affine = kernels.at(variables.get("params", {}), norm) or {}
    kernel, mean, var = params["kernel"], statistics["mean"], statistics["var"]
    features = _shape(kernel)[-1:]
    if _shape(mean) != features:
        raise ValueError(
            f"{norm!r} normalizes features of shape {_shape(mean)}, and the kernel of "
            f"{layer!r}, of shape {_shape(kernel)}, gives {features}"
        )
    factor = 1 / jnp.sqrt(unbox(var).astype(jnp.float32) + epsilon)
    if "scale" in affine:
        factor = factor * unbox(affine["scale"])
    offset = -unbox(mean) * factor
    if "bias" in affine:
        offset = offset + unbox(affine["bias"])
    if "bias" in params:
        params["bias"] = _with(params["bias"], unbox(params["bias"]) * factor + offset)
        offset = jnp.zeros_like(offset)
    params["kernel"] = _with(kernel, unbox(kernel) * factor)
    # The BatchNorm becomes the identity, plus the bias if the layer has none.
    statistics["var"] = _with(var, jnp.full(features, _complement(epsilon)))
    statistics["mean"] = _with(
        mean, jnp.zeros(features) if "bias" in affine else -offset
    )
    if "scale" in affine:
        affine["scale"] = _with(affine["scale"], jnp.ones(features))
    if "bias" in affine:
        affine["bias"] = _with(affine["bias"], offset)


def _check(variables: Mapping[str, Any], params: Any, layer: str) -> None:
    if not isinstance(params, dict) or "kernel" not in params:
        raise ValueError(
            f"{layer!r} is not a layer with a kernel in variables['params']; name the "
            "nn.Conv or nn.Dense in front of the BatchNorm"
        )
    if isinstance(params["kernel"], FrozenKernel):
        raise ValueError(f"the kernel of {layer!r} is frozen; fold before convert")
    kernels.check_no_adapter(layer, params)
    learned = kernels.learned(params)
    if learned:
        raise ValueError(
            f"{layer!r} has the learned parameters {learned} of a calibration, which "
            "were trained for the kernel as it is: its BatchNorm cannot be folded"
        )
    name = kernels.with_statistics(variables, layer, {"rhs", "out", "smoothing"})
    if name is not None:
        raise ValueError(
            f"{layer!r} has the statistics {name!r} of its kernel or its result, "
            "which would be others: fold first, and gather them again with "
            "calibrate"
        )
    kernels.check_not_normalized(variables, layer)


def _complement(epsilon: np.float32) -> np.float32:
    """Returns the variance that gives exactly one when epsilon is added in float32."""
    found = np.float32(1) - epsilon
    while found + epsilon != 1:
        found = np.nextafter(found, np.float32(2 if found + epsilon < 1 else 0))
    return found


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(unbox(x).shape)


def _with(x: Any, value: jax.Array) -> Any:
    """Returns a parameter with another value, in its box and dtype."""
    return nn.meta.replace_boxed(x, value.astype(unbox(x).dtype))
