"""Where in a Flax model a contraction stands, and the frozen weights that lie there.

A contraction keeps its frozen weights with the module that *calls* it, not with the
object that was called: one `AqtDotGeneral` may serve many layers, and each of them
has a scope of its own.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import errors
from flax import linen as nn
from flax.core import Scope, tracers

from aqtlite import config
from aqtlite.flax.identity import Identity
from aqtlite.flax.placeholder import FrozenKernel

COLLECTION = "aqt"
"""The collection of frozen weights, and the name of the optional rng stream."""


class Operand(NamedTuple):
    """What is static about one operand of a contraction."""

    side: str
    """ "lhs" or "rhs"."""

    shape: tuple[int, ...]
    contracting: tuple[int, ...]
    """Its contracting axes, in ascending order."""

    dtype: np.dtype

    def serving_order(self) -> tuple[int, ...]:
        """The order in which to store it frozen: what is summed over comes last.

        A few rows by a 4096 x 4096 kernel take a CPU half the time that way.
        """
        others = (a for a in range(len(self.shape)) if a not in self.contracting)
        return (*others, *self.contracting)

    def __str__(self) -> str:
        sizes = ",".join(map(str, self.shape))
        return f"{self.side} {np.dtype(self.dtype).name}[{sizes}]"


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[],
    meta_fields=["cfg", "operand", "identity", "made_of", "beside_floats"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """What `convert` knew of a frozen weight: a pytree without leaves.

    It lies beside the integers, and serving compares it with the call.
    """

    cfg: config.DotGeneral = dataclasses.field(repr=False)
    operand: Operand
    identity: Identity | None
    """Corners of the operand where its parameters are `FrozenKernel`s. None where they
    stayed in float: then the corners are an array beside the integers."""

    made_of: tuple[str, ...]
    """Paths of its parameters, joined by dots."""

    beside_floats: bool = False
    """Whether the module also contracts operands like this one that are not frozen."""


class Frozen(NamedTuple):
    """A frozen weight of a module."""

    name: str
    site: Site
    entry: Mapping[str, Any]


class AqtContraction(nn.Module):
    """A child that Flax attaches to the module whose method is running.

    That is all it is for: its parent is the caller, in whose scope the frozen weights
    lie.
    """

    def __post_init__(self):
        # Flax may refuse the child, but has told the parent by then. It is the one
        # public way to the module that is running: should Flax come to check first,
        # `find_caller` returns None, nothing is frozen, and the tests of this file
        # fail.
        refusals = errors.AssignSubModuleError, errors.NameInUseError
        with contextlib.suppress(*refusals):
            super().__post_init__()


class Caller(NamedTuple):
    """The module that made a call."""

    scope: Scope
    module: nn.Module
    is_inside: bool
    """Whether variables can leave: not inside a `jax.jit` or another transformation of
    its own that Flax does not know, such as the one in `jnp.einsum`."""


def find_caller() -> Caller | None:
    """The module whose method is running; None outside of modules."""
    module = AqtContraction().parent
    if not isinstance(module, nn.Module) or module.scope is None:
        return None
    inside = module.scope.trace_level == tracers.current_trace()
    return Caller(module.scope, module, inside)


def frozen_weights(scope: Scope) -> list[Frozen]:
    """The frozen weights of a module, unboxed."""
    entries = scope.variables().get(COLLECTION, {})
    return [
        Frozen(name, entry["site"], nn.meta.unbox(entry))
        for name, entry in entries.items()
        if isinstance(entry, Mapping) and isinstance(entry.get("site"), Site)
    ]


def describe(scope: Scope) -> str:
    """The path of a module, for error messages."""
    return scope.path_text or "/"


def has_float_parameter(scope: Scope, size: int) -> bool:
    """Whether a module has a float parameter of at least so many elements."""
    return any(
        getattr(nn.meta.unbox(value), "size", 0) >= size
        for value in scope.variables().get("params", {}).values()
        if not isinstance(value, FrozenKernel | Mapping)
    )


def frozen_parameter(scope: Scope, x: Any) -> str | None:
    """The name of a frozen parameter of a module that an operand may be made of."""
    for name, value in scope.variables().get("params", {}).items():
        if isinstance(value, FrozenKernel) and math.prod(value.shape) == x.size:
            return name
    return None


def check_removed(scope: Scope, weight: Frozen) -> None:
    """Refuses frozen weights beside the float parameters that they were made of.

    Raises:
        ValueError: if a parameter that the conversion replaced is there again.
    """
    if weight.site.identity is None:
        return
    params = scope.variables().get("params", {})
    for name in weight.site.made_of:
        value = params.get(name)
        if value is not None and not isinstance(value, FrozenKernel | Mapping):
            raise ValueError(
                f"parameter {name!r} of {describe(scope)} is a float, but the frozen "
                "weights that were made of it are there too and would be used in its "
                "place; convert the float variables again"
            )


def check_no_frozen_kernel(
    scope: Scope | None, operands: tuple[Any, ...], why: str
) -> None:
    """Refuses to contract a kernel that was frozen as if it were a float.

    Raises:
        ValueError: if the calling module has a `FrozenKernel` of an operand's size.
    """
    if scope is None:
        return
    for x in operands:
        name = frozen_parameter(scope, x)
        if name is not None:
            raise ValueError(
                f"parameter {name!r} of {describe(scope)} is frozen, but {why}. Serve "
                "with the model, config and variables of the conversion"
            )
