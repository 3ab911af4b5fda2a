"""Lookup of the frozen weights of a call in serving.

A frozen weight is found by what an operand is made of, never by the order of calls.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite import config
from aqtlite.lowering import exact
from aqtlite.qtensor import QTensor
from aqtlite.serving import identity
from aqtlite.serving.call_site import COLLECTION, IDENTITY, FrozenEntry, Operand
from aqtlite.serving.contraction import Contraction
from aqtlite.serving.placeholder import Placeholder


@dataclasses.dataclass(frozen=True)
class ModuleVariables:
    """The variables of the module that makes a call."""

    path: str
    """For error messages."""

    params: Mapping[str, Any]
    """Its own parameters: floats, and `Placeholder`s for those that are frozen."""

    frozen: Sequence[FrozenEntry]

    def frozen_parameter(self, x: Any) -> str | None:
        """Returns the name of a frozen parameter that an operand may be made of."""
        for name, value in self.params.items():
            if isinstance(value, Placeholder) and math.prod(value.shape) == x.size:
                return name
        return None

    def has_float_parameter(self, size: int) -> bool:
        """Tells whether there is a float parameter of at least so many elements."""
        return any(
            getattr(value, "size", 0) >= size
            for value in self.params.values()
            if not isinstance(value, Placeholder)
        )


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


def check_no_frozen_parameter(
    module: ModuleVariables, contraction: Contraction, why: str
) -> None:
    """Refuses to contract a parameter that was frozen as if it were a float.

    Raises:
        ValueError: if the calling module has a frozen parameter of an operand's size.
    """
    for x in (contraction.lhs, contraction.rhs):
        name = module.frozen_parameter(x)
        if name is not None:
            raise ValueError(
                f"parameter {name!r} of {module.path} is frozen, but {why}. Serve with "
                "the model, config and variables of the conversion"
            )


def frozen_operands(
    contraction: Contraction, module: ModuleVariables
) -> tuple[Any, Any]:
    """Returns the operands of a call, with frozen weights in place of their floats.

    Args:
        contraction: the call.
        module: the variables of the calling module.

    Returns:
        For each operand an array, a `QTensor`, or `Either`; `contract` takes them.

    Raises:
        ValueError: if a frozen weight does not fit the call, or if an operand is made
            of frozen parameters in a way that no converted call had.
    """
    operands = {"lhs": contraction.lhs, "rhs": contraction.rhs}
    for side in contraction.quantized_sides():
        x = jnp.asarray(operands[side])
        operand = contraction.operand(side)
        if not module.frozen:
            _check_has_weights(module, operand, x)
        candidates = _candidates(module, contraction.cfg, operand)
        if isinstance(x, jax.core.Tracer):
            if candidates:
                operands[side] = _traced(module, candidates, operand, x)
        else:
            operands[side] = _concrete(module, candidates, operand, x)
    return operands["lhs"], operands["rhs"]


def _check_has_weights(module: ModuleVariables, operand: Operand, x: Any) -> None:
    name = module.frozen_parameter(x)
    if name is not None:
        raise ValueError(
            f"parameter {name!r} of {module.path} is frozen, but the "
            f"collection '{COLLECTION}' holds nothing for this module, whose "
            f"{operand} it may be: the variables come from another model or another "
            "conversion, or were restored from a checkpoint without a target. Convert "
            "this model, or restore with "
            "jax.eval_shape(lambda v: convert(model, v, *args), variables) as target"
        )


def _check_removed(module: ModuleVariables, weight: FrozenEntry) -> None:
    """Refuses frozen weights beside the float parameters that they were made of.

    Raises:
        ValueError: if a parameter that the conversion replaced is there again.
    """
    if weight.site.identity is None:
        return
    for name in weight.site.made_of:
        value = module.params.get(name)
        if value is not None and not isinstance(value, Placeholder):
            raise ValueError(
                f"parameter {name!r} of {module.path} is a float, but the frozen "
                "weights that were made of it are there too and would be used in its "
                "place; convert the float variables again"
            )


def _candidates(
    module: ModuleVariables, cfg: config.DotGeneral, operand: Operand
) -> list[FrozenEntry]:
    """Returns the frozen weights that an operand may be, by all that is static."""
    similar = [one for one in module.frozen if one.site.operand.is_like(operand)]
    fitting = []
    for weight in similar:
        _check_removed(module, weight)
        if weight.site.cfg == cfg and weight.site.operand.dtype == operand.dtype:
            fitting.append(_checked(module, weight))
    if fitting or any(weight.site.beside_floats for weight in similar):
        return fitting
    for weight in similar:
        where = f"the frozen weight {weight.name!r} of {module.path}"
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


def stored(where: str, weight: FrozenEntry) -> QTensor:
    """Returns the `QTensor` of a frozen weight.

    Args:
        where: names the module that contracts it, for error messages.
        weight: as it is stored.

    Raises:
        ValueError: if it is not there, or its scales are not float32.
    """
    name = f"the frozen weight {weight.name!r} of {where}"
    operand = weight.site.operand
    qtensor = weight.values.get(operand.side)
    if not isinstance(qtensor, QTensor):
        raise ValueError(
            f"{name}, a {operand}, is missing from the collection '{COLLECTION}'; "
            "convert again"
        )
    if qtensor.scale.dtype != np.dtype("float32"):
        raise ValueError(
            f"the scale of {name} is {qtensor.scale.dtype}, but scales are float32: "
            "rounding them would change every product. Cast the parameters before "
            "they are converted, or what is left of them, and leave the collection "
            f"'{COLLECTION}' as it is"
        )
    return qtensor


def _checked(module: ModuleVariables, weight: FrozenEntry) -> FrozenEntry:
    qtensor, operand = stored(module.path, weight), weight.site.operand
    if qtensor.shape != operand.shape:
        raise ValueError(
            f"the frozen weight {weight.name!r} of {module.path} has shape "
            f"{qtensor.shape}, but was converted as {operand}; convert again"
        )
    return weight


def _concrete(
    module: ModuleVariables, candidates: Sequence[FrozenEntry], operand: Operand, x: Any
) -> Any:
    """Returns the frozen weight that an array is, or the array itself."""
    for weight in candidates:
        if _matches(weight, x):
            return weight.values[operand.side]
    parameter = module.frozen_parameter(x)
    if (candidates or parameter) and bool(jnp.isnan(x).any()):
        made_of = repr(parameter) if parameter else "frozen parameters"
        converted = ", ".join(
            f"{name} ({one.operand}, contracting axes {one.operand.contracting})"
            for name, one, _ in module.frozen
        )
        raise ValueError(
            f"the {operand} of a contraction of axes {operand.contracting} in "
            f"{module.path} holds NaN, as what is made of {made_of} does "
            "where it is not a frozen weight. The frozen weights there are "
            f"{converted}. If this call was not among those that were converted, "
            f"{_HOW_TO_ADD}"
        )
    return x


def _traced(
    module: ModuleVariables,
    candidates: Sequence[FrozenEntry],
    operand: Operand,
    x: jax.Array,
) -> "QTensor | Either":
    """Returns the frozen weight that a traced operand turns out to be.

    XLA folds the comparisons: the compiled program contracts a frozen weight and
    nothing else. An operand that is none of them is quantized as it is where the module
    has float operands like it, and becomes NaN elsewhere.
    """
    fixed = lax.stop_gradient(x)
    found = [_matches(weight, fixed) for weight in candidates]
    frozen = _first(found[:-1], [w.values[operand.side] for w in candidates])
    is_frozen = functools.reduce(jnp.logical_or, found)
    if _may_be_float(module, candidates, operand):
        # A float keeps its gradient. One of which a corner is NaN is a placeholder.
        return Either(is_frozen, frozen, jnp.where(identity.has_nan(fixed), jnp.nan, x))
    scale = jnp.where(is_frozen, frozen.scale, jnp.float32(jnp.nan))
    if any(weight.site.identity is None for weight in candidates):
        # XLA cannot fold this comparison, and must not fuse it into what follows.
        scale = exact.fusion_barrier(scale)
    names = ", ".join(weight.name for weight in candidates)
    scale = _without_gradient(f"{names} of {module.path}", scale, x)
    return dataclasses.replace(frozen, scale=scale)


def _may_be_float(
    module: ModuleVariables, candidates: Sequence[FrozenEntry], operand: Operand
) -> bool:
    """Tells whether an operand may be another one than the frozen weights like it."""
    if any(weight.site.identity is None for weight in candidates):
        # Then no other operand is like it, and the float parameter is its own.
        return False
    return any(weight.site.beside_floats for weight in candidates) or (
        module.has_float_parameter(math.prod(operand.shape))
    )


def _first(found: Sequence[jax.Array], weights: Sequence[QTensor]) -> QTensor:
    """Selects the weight whose condition is true; the last one has none."""
    if not found:
        return weights[0]
    return lax.cond(
        found[0], lambda: weights[0], lambda: _first(found[1:], weights[1:])
    )


def _matches(weight: FrozenEntry, x: jax.Array) -> jax.Array:
    if isinstance(weight.site.identity, str):
        return jnp.bool_(False)  # Of a contraction that a rule names.
    if weight.site.identity is None:
        return identity.matches_values(x, weight.values[IDENTITY])
    return identity.matches(x, weight.site.identity)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _without_gradient(where: str, scale: jax.Array, operand: jax.Array) -> jax.Array:
    """Returns the scale; raises if the frozen float operand is differentiated."""
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
