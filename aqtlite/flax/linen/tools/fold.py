"""Folds what follows or precedes a layer into its parameters, ahead of conversion."""

import dataclasses
import numbers
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import core as flax_core
from flax import linen as nn

from aqtlite import errors
from aqtlite.flax.linen import given_variables
from aqtlite.flax.linen.frozen_kernel import FrozenKernel
from aqtlite.program.serving import statistics_uses
from aqtlite.program.serving.frozen_record import COLLECTION
from aqtlite.quantization.states.state_collections import STATISTICS

_LEARNED = "aqt_"
"""Prefix of a contraction's learned parameters among those of the layer."""


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
            result, ``axis=`` and ``transpose_kernel=`` are not detected: compare the
            model's outputs before and after.
        epsilon: epsilon of the BatchNorms.

    Returns:
        The changed variables, for calls with ``use_running_average=True``.

    Raises:
        TypeError: if `layers` is not a mapping of paths.
        ValueError: if there is no such layer or BatchNorm, if two BatchNorms name one
            layer, if shapes do not fit, if the kernel is frozen or normalized
            (`nn.WeightNorm`, `nn.SpectralNorm`), or if the scale of the kernel or the
            result is learned or computed from statistics.

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
    changed = {name: flax_core.unfreeze(value) for name, value in variables.items()}
    for norm, layer in layers.items():
        _fold(changed, norm, layer, np.float32(epsilon))
    return changed


def _fold(
    variables: dict[str, Any], norm: str, layer: str, epsilon: np.float32
) -> None:
    statistics = _at(variables.get("batch_stats", {}), norm)
    if not isinstance(statistics, dict) or set(statistics) != {"mean", "var"}:
        raise ValueError(
            f"{norm!r} has no running mean and variance in variables['batch_stats']: "
            "it is no BatchNorm, or the variables are without their statistics"
        )
    params = _at(variables.get("params", {}), layer)
    _check(variables, params, layer)
    affine = _at(variables.get("params", {}), norm) or {}
    kernel, mean, var = params["kernel"], statistics["mean"], statistics["var"]
    features = _shape(kernel)[-1:]
    if _shape(mean) != features:
        raise ValueError(
            f"{norm!r} normalizes features of shape {_shape(mean)}, and the kernel of "
            f"{layer!r}, of shape {_shape(kernel)}, gives {features}"
        )
    factor = 1 / jnp.sqrt(_value(var).astype(jnp.float32) + epsilon)
    if "scale" in affine:
        factor = factor * _value(affine["scale"])
    offset = -_value(mean) * factor
    if "bias" in affine:
        offset = offset + _value(affine["bias"])
    if "bias" in params:
        params["bias"] = _with(params["bias"], _value(params["bias"]) * factor + offset)
        offset = jnp.zeros_like(offset)
    params["kernel"] = _with(kernel, _value(kernel) * factor)
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
    learned = _learned(params)
    if learned:
        raise ValueError(
            f"{layer!r} has the learned parameters {learned} of a calibration, which "
            "were trained for the kernel as it is: its BatchNorm cannot be folded"
        )
    name = _with_statistics(variables, layer, {"rhs", "out", "smoothing"})
    if name is not None:
        raise ValueError(
            f"{layer!r} has the statistics {name!r} of its kernel or its result, "
            "which would be others: fold first, and gather them again with "
            "calibrate"
        )
    _check_not_normalized(variables, layer)


def _learned(params: Mapping[str, Any]) -> list[str]:
    """Names of the learned parameters of a layer's calibrations."""
    return [name for name in params if name.startswith(_LEARNED)]


def _with_statistics(
    variables: Mapping[str, Any], layer: str, of: Collection[str]
) -> str | None:
    """Name of a contraction of the layer that has some of these statistics."""
    entries = _at(variables.get(STATISTICS, {}), layer) or {}
    return next((name for name, one in entries.items() if set(of) & set(one)), None)


def _check_not_normalized(variables: Mapping[str, Any], layer: str) -> None:
    """Checks that no `nn.WeightNorm` or `nn.SpectralNorm` normalizes the kernel."""
    *parents, name = layer.split("/")
    for collection in variables.values():
        around = collection if not parents else _at(collection, "/".join(parents))
        for norm, node in (around or {}).items():
            keys = node if isinstance(node, dict) else ()
            if any(key.startswith(f"{name}/") for key in keys):
                raise ValueError(
                    f"{norm!r} normalizes the kernel of {layer!r}, which would undo a "
                    "factor of the kernel: compute the normalized kernel first"
                )


def _complement(epsilon: np.float32) -> np.float32:
    """Returns the variance that gives exactly one when epsilon is added in float32."""
    found = np.float32(1) - epsilon
    while found + epsilon != 1:
        found = np.nextafter(found, np.float32(2 if found + epsilon < 1 else 0))
    return found


def _value(x: Any) -> jax.Array:
    return nn.meta.unbox(x)


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(_value(x).shape)


def _with(x: Any, value: jax.Array) -> Any:
    """Returns a parameter with another value, in its box and dtype."""
    return nn.meta.replace_boxed(x, value.astype(_value(x).dtype))


def absorb_smoothing(
    variables: Mapping[str, Any],
    contractions: Sequence[str],
    *,
    into: str,
    added: float = 0.0,
) -> dict[str, Any]:
    """Folds the division by smoothing scales into the module before the contractions.

    The parameters of a LayerNorm or RMSNorm (scale and bias), or of a Dense layer
    (output columns and bias), are divided by the scales, and the contractions that
    read its output no longer divide it: smoothing then costs nothing in serving. With
    power-of-two scales, the model's outputs are equal bit for bit, unless the module is
    a Dense layer whose kernel shares scales among output columns.

    Operations between the module and the contractions must commute with a positive
    per-channel scale, as `nn.relu`, dropout and reshapes do; the module's output must
    be proportional to its parameters (but for `added`), with its channels along their
    last axes; and *nothing else may read the output*. None of this can be checked from
    variables: compare the model's outputs before and after.

    Contractions that share an operand, such as query, key and value, share the scales:
    the smallest for each channel, as SmoothQuant gives for the concatenated weights.
    Absorb before `convert`, which folds the scales into the frozen weights.

    Args:
        variables: variables of a Linen model, with the statistics of smoothing
            (`calibrate`).
        contractions: paths of the contracting modules, such as
            ``["Block_0/attention/query", "Block_0/attention/key"]``. For a module with
            several contractions, append the contraction's name: ``"Block_0/scores"``.
        into: path of the module before them, such as ``"Block_0/LayerNorm_0"``.
        added: what the module adds to the parameter that scales its output: 1 for norms
            that multiply by ``1 + scale``, as those of Gemma. Outputs are then equal up
            to the rounding of that sum.

    Returns:
        The changed variables. The smoothing statistics of these contractions are fixed
        from now on.

    Raises:
        TypeError: if `contractions` is not a list of paths, or empty, or `added` not a
            number.
        ValueError: if there is no such smoothing or module, if shapes do not fit, if
            frozen weights would have to change, or if `into` has learned or static
            ranges of its kernel or its result, or a normalized kernel.

    >>> from aqtlite import config
    >>> from aqtlite.flax import AqtDotGeneral, calibrate
    >>> dense = nn.Dense(4, dot_general=AqtDotGeneral(config.smoothquant()))
    >>> model = nn.Sequential([nn.LayerNorm(), dense])
    >>> x = jnp.arange(6.0).reshape(2, 3)
    >>> variables = calibrate(model, model.init(jax.random.key(0), x), [x])
    >>> absorbed = absorb_smoothing(variables, ["layers_1"], into="layers_0")
    >>> bool((model.apply(absorbed, x) == model.apply(variables, x)).all())
    True
    """
    if isinstance(contractions, str) or not contractions:
        raise TypeError(
            "absorb_smoothing takes a list of paths of contractions, got "
            f"{contractions!r}"
        )
    if isinstance(added, bool) or not isinstance(added, numbers.Real):
        raise TypeError(f"absorb_smoothing takes a number as added=, got {added!r}")
    changed = given_variables.unfrozen(variables)
    found = {path: _smoothing(changed, path) for path in contractions}
    factors = [entry["smoothing"].lhs_factor for entry in found.values()]
    # The factor is the reciprocal of the scale: the largest one has the smallest scale.
    factor = factors[0]
    for path, one in zip(found, factors, strict=True):
        if one.shape != factor.shape:
            raise ValueError(
                f"the scales of {path} have shape {one.shape}, and those of "
                f"{contractions[0]} {factor.shape}: they do not contract one operand"
            )
        if jax.tree.leaves(changed.get(COLLECTION, {})) and (one != factor).any():
            raise ValueError(
                f"{path} and {contractions[0]} are frozen with different scales; "
                "absorb their smoothing before convert"
            )
        factor = jnp.maximum(factor, one)
    _multiply(changed, into, factor, np.float32(added))
    for entry in found.values():
        entry["smoothing"] = dataclasses.replace(
            entry["smoothing"], lhs_factor=(), absorbed=factor
        )
    return changed


def _smoothing(variables: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Returns the states of the smoothed contraction at a path."""
    node = _at(variables.get(STATISTICS, {}), path)
    entries = [node] if isinstance(node, dict) and "smoothing" in node else []
    if isinstance(node, dict) and not entries:
        entries = [
            entry
            for entry in node.values()
            if isinstance(entry, dict) and "smoothing" in entry
        ]
    if len(entries) != 1:
        problem = "has no smoothing with statistics; gather some with calibrate"
        if entries:
            problem = "has several contractions; name one of them: " + ", ".join(
                f"{path}/{name}" for name in sorted(node)
            )
        raise ValueError(f"{path!r} {problem}")
    state = entries[0]["smoothing"]
    if state.is_absorbed:
        raise ValueError(f"the smoothing of {path!r} is absorbed already")
    if not np.isfinite(np.asarray(state.lhs_factor)).all():
        raise ValueError(
            f"the scales of {path!r} are not finite: its statistics have seen no "
            "batch, or one with infinities or NaN"
        )
    return entries[0]


def _multiply(
    variables: dict[str, Any], path: str, factor: jax.Array, added: np.float32
) -> None:
    """Multiplies the parameters of a module, all but "bias" plus `added`."""
    params = _at(variables.get("params", {}), path)
    learned = _learned(params) if isinstance(params, dict) else []
    name = _with_statistics(variables, path, {"rhs", "out"})
    if name is not None or learned:
        raise ValueError(
            f"into={path!r} has learned or static ranges of its kernel or its result, "
            f"{name or learned}, which would be others: quantize them with dynamic "
            "ranges, such as calibration.AbsMax()"
        )
    if not isinstance(params, dict) or any(
        isinstance(x, dict) for x in params.values()
    ):
        raise ValueError(
            f"into={path!r} is not a module with parameters of its own in "
            "variables['params']; name the LayerNorm, RMSNorm or Dense before the "
            "contractions"
        )
    if not set(params) - {"bias"}:
        raise ValueError(
            f"into={path!r} has the parameters {sorted(params)}, and none that scales "
            "its output: give it one (use_scale=True)"
        )
    _check_not_normalized(variables, path)
    for name, value in params.items():
        if isinstance(value, FrozenKernel):
            raise ValueError(
                f"parameter {name!r} of {path!r} is frozen; absorb the smoothing "
                "before convert"
            )
        where = f"parameter {name!r} of {path!r}"
        more = np.float32(0) if name == "bias" else added
        params[name] = jax.tree.map(
            lambda x, more=more, where=where: _product(x, factor, more, where), value
        )


def _product(
    x: jax.Array, factor: jax.Array, added: np.float32, where: str
) -> jax.Array:
    """Multiplies a parameter by a factor with keepdims axes of a contraction's lhs.

    What is `added` to the parameter is multiplied, too.

    The channels are the trailing axes of the factor with sizes other than one. Layers
    stacked by a scan have another axis in front.
    """
    full = [axis for axis, size in enumerate(factor.shape) if size != 1]
    first = len(factor.shape)
    while first and factor.shape[first - 1] != 1:
        first -= 1
    stacked = [axis for axis in full if axis < first]
    lead = tuple(factor.shape[axis] for axis in stacked)
    channels = factor.shape[first:]
    room = x.ndim - len(lead) - len(channels)
    fits = room >= 0 and x.shape[: len(lead)] == lead
    fits = fits and x.shape[x.ndim - len(channels) :] == channels
    if not fits or not channels or stacked != list(range(len(stacked))):
        raise ValueError(
            f"{where} has shape {x.shape}, whose last axes are not the channels of the "
            f"contraction, whose scales have shape {factor.shape}"
        )
    laid_out = factor.reshape(lead + (1,) * room + channels)
    if not added:
        return (x * laid_out).astype(x.dtype)
    return ((x + added) * laid_out - added).astype(x.dtype)


def _at(tree: Any, path: str) -> Any:
    """Returns the node at a path, or None."""
    return statistics_uses.at(tree, tuple(path.split("/")))
