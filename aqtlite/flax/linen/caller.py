"""The Linen module that makes a call, and its variables.

Frozen weights are kept with the module that *calls* a contraction, not with the object
that is called: one `AqtDotGeneral` may serve many layers, each of which has a scope of
its own.
"""

import contextlib
from collections.abc import Mapping
from typing import NamedTuple

from flax import errors
from flax import linen as nn
from flax.core import Scope, tracers

from aqtlite.serving.call_site import COLLECTION, SITE, CallSite, FrozenEntry
from aqtlite.serving.lookup import ModuleVariables
from aqtlite.serving.placeholder import Placeholder


class AqtContraction(nn.Module):
    """A child that Flax attaches to the module whose method is running.

    Its parent is the caller, in whose scope the frozen weights lie.
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
    """Variables can leave: it is not inside a `jax.jit` or another transformation of
    its own that Flax does not know, such as the one in `jnp.einsum`."""


def find_caller() -> Caller | None:
    """Returns the module whose method is running; None outside of modules."""
    module = AqtContraction().parent
    if not isinstance(module, nn.Module) or module.scope is None:
        return None
    inside = module.scope.trace_level == tracers.current_trace()
    return Caller(module.scope, module, inside)


def path_of(scope: Scope) -> str:
    """Returns the path of a module, for error messages."""
    return scope.path_text.removeprefix("/") or "the root module"


def module_variables(scope: Scope) -> ModuleVariables:
    """Returns the variables of a module, unboxed but for what is frozen."""
    variables = scope.variables()
    params = {
        name: value if isinstance(value, Placeholder) else nn.meta.unbox(value)
        for name, value in variables.get("params", {}).items()
        if not isinstance(value, Mapping)
    }
    frozen = [
        FrozenEntry(name, entry[SITE], nn.meta.unbox(entry))
        for name, entry in variables.get(COLLECTION, {}).items()
        if isinstance(entry, Mapping) and isinstance(entry.get(SITE), CallSite)
    ]
    return ModuleVariables(path_of(scope), params, frozen)
