"""Folds the scales of smoothing into the module before the contractions."""

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.flax.linen import given_variables
from aqtlite.flax.linen.frozen_kernel import FrozenKernel
from aqtlite.flax.linen.tools import kernels
from aqtlite.program.serving.frozen_record import COLLECTION
from aqtlite.quantization.states.state_collections import STATISTICS


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

    >>> import flax.linen as nn
    >>> import jax
    >>> import jax.numpy as jnp
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
    node = kernels.at(variables.get(STATISTICS, {}), path)
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
    params = kernels.at(variables.get("params", {}), path)
    kernels.check_no_adapter(path, params)
    learned = kernels.learned(params) if isinstance(params, dict) else []
    name = kernels.with_statistics(variables, path, {"rhs", "out"})
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
    kernels.check_not_normalized(variables, path)
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
