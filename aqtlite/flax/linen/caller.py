"""The Linen module that makes a call, and its variables.

Frozen weights belong to the module that *calls* a contraction, not to the called
object: layers with scopes of their own may share one `AqtDotGeneral`.
"""

import contextlib
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from flax import errors
from flax import linen as nn
from flax.core import Scope, tracers

from aqtlite.program.serving import guards
from aqtlite.program.serving.frozen_record import (
    COLLECTION,
    FrozenRecord,
    frozen_entries,
)
from aqtlite.program.serving.lookup import ModuleVariables
from aqtlite.program.serving.placeholder import Placeholder


class AqtContraction(nn.Module):
    """A child that Flax attaches to the module whose method is running.

    Its parent is the caller; the frozen weights are in the parent's scope.
    """

    def __post_init__(self):
        # Flax may refuse the child, but has set its parent by then. No other public
        # API gives the running module: should Flax check first in the future,
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
    """Whether variables can be created or updated: not inside a `jax.jit` or another
    transformation that Flax does not know of, such as the one in `jnp.einsum`."""


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
    """Returns the variables of a module, unboxed except for `FrozenKernel`s.

    Raises:
        ValueError: if frozen weights were restored without a target.
    """
    variables = scope.variables()
    params = {
        name: _unboxed(value)
        for name, value in variables.get("params", {}).items()
        if not isinstance(value, Mapping)
    }
    guards.check_restored(variables.get(COLLECTION, {}))
    frozen = [
        one._replace(values=nn.meta.unbox(one.values))
        for module, one in frozen_entries(variables.get(COLLECTION, {}))
        if not module
    ]
    return ModuleVariables(
        scope.path,
        params,
        frozen,
        functools.partial(_find, scope.root),
        functools.partial(_records, scope.root),
    )


def _find(root: Scope, path: str) -> Any:
    """Returns the parameter at a path; None if it is not below the root."""
    steps = tuple(path.split("/"))
    count = len(root.path)
    if steps[:count] != root.path or len(steps) == count:
        return None
    first, *others = steps[count:]
    node = root.get_variable("params", first)
    for step in others:
        node = node.get(step) if isinstance(node, Mapping) else None
    return _unboxed(node)


def _records(root: Scope) -> list[tuple[tuple[str, ...], FrozenRecord]]:
    """Returns the records of weights below a root, each with its module's path."""
    entries = frozen_entries(root.variables().get(COLLECTION, {}), root.path)
    return [(module, one.record) for module, one in entries]


def _unboxed(value: Any) -> Any:
    return value if isinstance(value, Placeholder) else nn.meta.unbox(value)
