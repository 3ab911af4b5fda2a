"""Lookup of frozen weights by a bare call.

A frozen weight is found by the fingerprint of the operand, never by the order of calls.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite import config
from aqtlite.flax.linen.bare import fingerprints, placeholder_values
from aqtlite.flax.linen.bare.module_variables import ModuleVariables
from aqtlite.program.serving import guards
from aqtlite.program.serving.contraction import Contraction
from aqtlite.program.serving.frozen_record import (
    IDENTITY,
    FrozenEntry,
    Operand,
)
from aqtlite.program.serving.placeholder import Placeholder
from aqtlite.qtensor.qtensor import QTensor


class Either(NamedTuple):
    """An operand that is a frozen weight or a float, decided at run time."""

    is_frozen: jax.Array
    frozen: QTensor
    plain: jax.Array


def contract(function: Callable[[Any, Any], Any], lhs: Any, rhs: Any) -> Any:
    """Contracts the operands that `frozen_operands` returned.

    Args:
        function: the contraction.
        lhs: array, `QTensor` or `Either`.
        rhs: array, `QTensor` or `Either`.
    """
    if isinstance(lhs, Either):
        return lax.cond(
            lhs.is_frozen,
            lambda: contract(function, lhs.frozen, rhs),
            lambda: contract(function, lhs.plain, rhs),
        )
    if isinstance(rhs, Either):
        return lax.cond(
            rhs.is_frozen,
            lambda: contract(function, lhs, rhs.frozen),
            lambda: contract(function, lhs, rhs.plain),
        )
    return function(lhs, rhs)


def check_no_frozen_parameter(
    module: ModuleVariables, contraction: Contraction, why: str
) -> None:
    """Refuses to contract a frozen parameter as a float.

    Raises:
        ValueError: if the calling module has a frozen parameter of an operand's size.
    """
    for x in (contraction.lhs, contraction.rhs):
        name = module.frozen_parameter(x)
        if name is not None:
            guards.check_has_weight(name, module.records(), guards.LINEN)
            guards.refuse_float_read(name, why, guards.LINEN)


def frozen_operands(
    contraction: Contraction, module: ModuleVariables
) -> tuple[Any, Any]:
    """Returns the operands of a call, with frozen weights in place of floats.

    Args:
        contraction: the call.
        module: the variables of the calling module.

    Returns:
        For each operand an array, a `QTensor` or an `Either`, for `contract`.

    Raises:
        ValueError: if a frozen weight does not fit the call, or if an operand is made
            of frozen parameters as in no converted call.
    """
    operands = {"lhs": contraction.lhs, "rhs": contraction.rhs}
    for side in contraction.quantized_sides():
        x = jnp.asarray(operands[side])
        operand = contraction.operand(side)
        candidates = _candidates(module, contraction.cfg, operand)
        parameter = module.frozen_parameter(x)
        if not candidates and parameter is not None:
            guards.check_has_weight(parameter, module.records(), guards.LINEN)
            _check_sizes(module, operand)
            if not module.frozen:
                guards.refuse_another_way(parameter, operand, str(module), guards.LINEN)
        stays = [one for one in candidates if one.record.identity is None]
        if stays:
            operands[side] = _beside_floats(module, stays[0], x)
        elif not isinstance(x, jax.core.Tracer):
            operands[side] = _concrete(module, candidates, operand, x)
        elif candidates:
            operands[side] = _traced(module, candidates, operand, x)
    return operands["lhs"], operands["rhs"]


def _check_sizes(module: ModuleVariables, operand: Operand) -> None:
    """Refuses frozen weights whose size is not that of their only parameter.

    They belong to a larger or smaller model. Sliced parameters are not checked.
    """
    for weight in module.frozen:
        first, *others = weight.record.made_of
        parameter = module.params.get(first)
        if others or not isinstance(parameter, Placeholder) or any(parameter.sliced):
            continue
        converted = weight.record.operand
        if math.prod(converted.shape) != math.prod(parameter.shape):
            name = module.name(weight.name)
            guards.refuse_another_operand(name, converted, operand, guards.LINEN)


def _check_not_beside_floats(module: ModuleVariables, weight: FrozenEntry) -> None:
    """Refuses a frozen weight beside float parameters that it replaced."""
    record = weight.record
    if record.removed is None and record.identity is not None:
        # The conversion did not store what it removed, and removed all of it.
        removed = tuple(map(module.name, record.made_of))
        record = dataclasses.replace(record, removed=removed)
    found = {name: module.find(name) for name in record.removed or ()}
    floats = {
        name
        for name, value in found.items()
        if value is not None and not isinstance(value, Placeholder)
    }
    guards.check_not_beside_floats(record, floats, guards.LINEN)


def _candidates(
    module: ModuleVariables, cfg: config.DotGeneral, operand: Operand
) -> list[FrozenEntry]:
    """Returns the frozen weights that fit an operand's static description."""
    similar = [one for one in module.frozen if one.record.operand.is_like(operand)]
    for weight in similar:
        _check_not_beside_floats(module, weight)
    may_be_float = any(
        one.record.beside_floats and not isinstance(one.record.identity, str)
        for one in similar
    )
    if may_be_float and not any(one.record.fits(cfg, operand) for one in similar):
        return []
    named = [(module.name(weight.name), weight) for weight in similar]
    return guards.fitting(named, cfg, operand, (), guards.LINEN)


def _beside_floats(module: ModuleVariables, weight: FrozenEntry, x: jax.Array) -> Any:
    """Returns a frozen weight after comparing it with the floats that stay beside it.

    No other operand of the module is like it.
    """
    name, frozen = module.name(weight.name), weight.values[weight.record.operand.side]
    is_same = fingerprints.matches_values(lax.stop_gradient(x), weight.values[IDENTITY])
    found = guards.unless_stale(name, frozen, is_same, guards.LINEN)
    is_traced = isinstance(x, jax.core.Tracer)
    return guards.without_gradient(name, found, x) if is_traced else found


def _concrete(
    module: ModuleVariables, candidates: Sequence[FrozenEntry], operand: Operand, x: Any
) -> Any:
    """Returns the frozen weight that matches a concrete array, or the array."""
    for weight in candidates:
        if _matches(weight, x):
            return weight.values[operand.side]
    if _is_made_of_frozen(module, candidates, x):
        parameter = module.frozen_parameter(x)
        if parameter is None:
            parameter = ", ".join(module.name(one.name) for one in module.frozen)
        guards.refuse_another_way(parameter, operand, str(module), guards.LINEN)
    return x


def _is_made_of_frozen(
    module: ModuleVariables, candidates: Sequence[FrozenEntry], x: jax.Array
) -> bool:
    """Whether an array has the NaNs of a placeholder.

    Without candidates it must have as many as a placeholder of its size: an activation
    may contain some NaN of its own.
    """
    found = jnp.isnan(x).sum()
    if candidates:
        return bool(found)
    of_size = module.frozen_of_size(x.size).values()
    return any(
        found >= jnp.isnan(placeholder_values.values_of(value)).sum()
        for value in of_size
    )


def _traced(
    module: ModuleVariables,
    candidates: Sequence[FrozenEntry],
    operand: Operand,
    x: jax.Array,
) -> "QTensor | Either":
    """Selects the frozen weight that matches a traced operand.

    XLA folds the comparisons: the compiled program contracts one frozen weight and
    nothing else. An operand that matches none is quantized in the call if the module
    has float operands like it, and otherwise becomes NaN.
    """
    fixed = lax.stop_gradient(x)
    found = [_matches(weight, fixed) for weight in candidates]
    frozen = _first(found[:-1], [w.values[operand.side] for w in candidates])
    is_frozen = functools.reduce(jnp.logical_or, found)
    if _may_be_float(module, candidates, operand):
        # A float keeps its gradient; with NaN in its fingerprint it is a placeholder.
        return Either(
            is_frozen, frozen, jnp.where(fingerprints.has_nan(fixed), jnp.nan, x)
        )
    scale = jnp.where(is_frozen, frozen.scale, jnp.float32(jnp.nan))
    frozen = dataclasses.replace(frozen, scale=scale)
    names = ", ".join(module.name(weight.name) for weight in candidates)
    return guards.without_gradient(names, frozen, x)


def _may_be_float(
    module: ModuleVariables, candidates: Sequence[FrozenEntry], operand: Operand
) -> bool:
    """Whether an operand may be a float instead of one of the candidates."""
    return any(weight.record.beside_floats for weight in candidates) or (
        module.has_float_parameter(math.prod(operand.shape))
    )


def _first(found: Sequence[jax.Array], weights: Sequence[QTensor]) -> QTensor:
    """Selects the first weight with a true condition; the last is the default."""
    if not found:
        return weights[0]
    return lax.cond(
        found[0], lambda: weights[0], lambda: _first(found[1:], weights[1:])
    )


def _matches(weight: FrozenEntry, x: jax.Array) -> jax.Array:
    found = weight.record.identity
    if not isinstance(found, tuple):
        return jnp.bool_(False)  # A string: from a contraction quantized by a rule.
    return fingerprints.matches(x, found)
