"""Frozen weights for a call in serving, found by what its operands are made of."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import Scope
from jax import lax

from aqtlite import config
from aqtlite.flax import identity, site
from aqtlite.flax.observing import Contraction
from aqtlite.flax.site import Frozen, Operand
from aqtlite.lowering import exact
from aqtlite.qtensor import QTensor


class Either(NamedTuple):
    """An operand that is a frozen weight or a float, which XLA or the call decides."""

    is_frozen: jax.Array
    frozen: QTensor
    plain: jax.Array


def contract(
    function: Callable[[Any, Any], jax.Array], lhs: Any, rhs: Any
) -> jax.Array:
    """Contracts operands as they are, or as they turn out to be.

    Args:
        function: the contraction.
        lhs: of `frozen_operands`.
        rhs: the same.
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


def frozen_operands(contraction: Contraction, scope: Scope) -> tuple[Any, Any]:
    """The operands of a call, with frozen weights in place of those that are.

    Args:
        contraction: the call.
        scope: of the calling module, whose variables hold frozen weights.

    Returns:
        For each operand an array, a `QTensor`, or `Either`; `contract` takes them.

    Raises:
        ValueError: if a frozen weight does not fit the call, or if an operand is made
            of frozen parameters in a way that no converted call had.
    """
    weights = site.frozen_weights(scope)
    operands = {"lhs": contraction.lhs, "rhs": contraction.rhs}
    for side in contraction.quantized_sides():
        x = jnp.asarray(operands[side])
        operand = contraction.operand(side)
        if not weights:
            _check_has_weights(scope, operand, x)
        candidates = _candidates(scope, weights, contraction.cfg, operand)
        if isinstance(x, jax.core.Tracer):
            if candidates:
                operands[side] = _traced(scope, candidates, operand, x)
        else:
            operands[side] = _concrete(scope, candidates, operand, x)
    return operands["lhs"], operands["rhs"]


def _check_has_weights(scope: Scope, operand: Operand, x: Any) -> None:
    name = site.frozen_parameter(scope, x)
    if name is not None:
        raise ValueError(
            f"parameter {name!r} of {site.describe(scope)} is frozen, but the "
            f"collection '{site.COLLECTION}' holds nothing for this module, whose "
            f"{operand} it may be: the variables come from another model or another "
            "conversion, or were restored from a checkpoint without a target. Convert "
            "this model, or restore with "
            "jax.eval_shape(lambda v: convert(model, v, *args), variables) as target"
        )


def _candidates(
    scope: Scope, weights: Sequence[Frozen], cfg: config.DotGeneral, operand: Operand
) -> list[Frozen]:
    """The frozen weights that an operand may be, by all that is static."""
    similar = [weight for weight in weights if weight.site.operand[:3] == operand[:3]]
    fitting = []
    for weight in similar:
        site.check_removed(scope, weight)
        if weight.site.cfg == cfg and weight.site.operand.dtype == operand.dtype:
            fitting.append(_checked(scope, weight))
    if fitting or any(weight.site.beside_floats for weight in similar):
        return fitting
    for weight in similar:
        where = f"the frozen weight {weight.name!r} of {site.describe(scope)}"
        if weight.site.cfg != cfg:
            changes = "; ".join(config.differences(weight.site.cfg, cfg))
            raise ValueError(
                f"{where} was converted with another config than it is called with: "
                f"{changes}"
            )
        raise ValueError(
            f"{where} was converted as {weight.site.operand} and is called as "
            f"{operand}; {_HOW_TO_ADD}"
        )
    return []


_HOW_TO_ADD = (
    "give this call to convert, too: convert(model, variables, calls=[Call(...), ...])"
)


def _checked(scope: Scope, weight: Frozen) -> Frozen:
    where = f"the frozen weight {weight.name!r} of {site.describe(scope)}"
    operand = weight.site.operand
    qtensor = weight.entry.get(operand.side)
    if not isinstance(qtensor, QTensor):
        raise ValueError(
            f"{where}, a {operand}, is missing from the collection "
            f"'{site.COLLECTION}'; convert again"
        )
    if qtensor.shape != operand.shape:
        raise ValueError(
            f"{where} has shape {qtensor.shape}, but was converted as {operand}; "
            "convert again"
        )
    if qtensor.scale.dtype != np.dtype("float32"):
        raise ValueError(
            f"the scale of {where} is {qtensor.scale.dtype}, but scales are float32: "
            "rounding them would change every product. Cast the parameters before "
            "convert, or only serving['params'], and leave the collection "
            f"'{site.COLLECTION}' as it is"
        )
    return weight


def _concrete(
    scope: Scope, candidates: Sequence[Frozen], operand: Operand, x: Any
) -> Any:
    """The frozen weight that an array is, or the array itself."""
    for weight in candidates:
        if _matches(weight, x):
            return weight.entry[operand.side]
    parameter = site.frozen_parameter(scope, x)
    if (candidates or parameter) and bool(jnp.isnan(x).any()):
        made_of = repr(parameter) if parameter else "frozen parameters"
        converted = ", ".join(
            f"{name} ({one.operand}, contracting axes {one.operand.contracting})"
            for name, one, _ in site.frozen_weights(scope)
        )
        raise ValueError(
            f"the {operand} of a contraction of axes {operand.contracting} in "
            f"{site.describe(scope)} holds NaN, as what is made of {made_of} does "
            "where it is not a frozen weight. The frozen weights there are "
            f"{converted}. If this call was not among those that were converted, "
            f"{_HOW_TO_ADD}"
        )
    return x


def _traced(
    scope: Scope,
    candidates: Sequence[Frozen],
    operand: Operand,
    x: jax.Array,
) -> "QTensor | Either":
    """The frozen weight that a traced operand turns out to be.

    XLA folds the comparisons: what is compiled contracts a frozen weight and nothing
    else. An operand that is none of them is quantized as it is where the module has
    float operands like it, and becomes NaN elsewhere.
    """
    fixed = lax.stop_gradient(x)
    found = [_matches(weight, fixed) for weight in candidates]
    frozen = _first(found[:-1], [w.entry[operand.side] for w in candidates])
    is_frozen = functools.reduce(jnp.logical_or, found)
    if _may_be_float(scope, candidates, operand):
        # A float keeps its gradient. One of which a corner is NaN is a placeholder.
        return Either(is_frozen, frozen, jnp.where(identity.has_nan(fixed), jnp.nan, x))
    scale = jnp.where(is_frozen, frozen.scale, jnp.float32(jnp.nan))
    if any(weight.site.identity is None for weight in candidates):
        # XLA cannot fold this comparison, and must not fuse it into what follows.
        scale = exact.materialized(scale)
    names = ", ".join(weight.name for weight in candidates)
    scale = _without_gradient(f"{names} of {site.describe(scope)}", scale, x)
    return dataclasses.replace(frozen, scale=scale)


def _may_be_float(scope: Scope, candidates: Sequence[Frozen], operand: Operand) -> bool:
    """Whether an operand may be something else than the frozen weights like it."""
    if any(weight.site.identity is None for weight in candidates):
        # Then no other operand is like it, and the float parameter is its own.
        return False
    return any(weight.site.beside_floats for weight in candidates) or (
        site.has_float_parameter(scope, math.prod(operand.shape))
    )


def _first(found: Sequence[jax.Array], weights: Sequence[QTensor]) -> QTensor:
    """The weight whose condition is true; the last one has none."""
    if not found:
        return weights[0]
    return lax.cond(
        found[0], lambda: weights[0], lambda: _first(found[1:], weights[1:])
    )


def _matches(weight: Frozen, x: jax.Array) -> jax.Array:
    if weight.site.identity is None:
        return identity.matches_values(x, weight.entry["identity"])
    return identity.matches(x, weight.site.identity)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _without_gradient(where: str, scale: jax.Array, operand: jax.Array) -> jax.Array:
    """The scale; raises if the float operand that was frozen is differentiated."""
    del where, operand
    return scale


def _without_gradient_fwd(where: str, scale: Any, operand: Any):
    if operand.perturbed:
        raise TypeError(
            f"a gradient was asked with respect to parameters that are frozen "
            f"({where}): serving variables are not for training. Train on the float "
            "variables and convert them again"
        )
    return scale.value, None


def _without_gradient_bwd(where: str, residuals: None, g: Any):
    del where, residuals
    return g, None


_without_gradient.defvjp(
    _without_gradient_fwd, _without_gradient_bwd, symbolic_zeros=True
)
