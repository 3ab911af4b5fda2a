"""The variables of the module that makes a bare call, as a lookup sees them."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flax import linen as nn
from flax.core import Scope

from aqtlite.flax.linen.caller import unboxed
from aqtlite.program.serving import guards
from aqtlite.program.serving.frozen_record import (
    COLLECTION,
    FrozenEntry,
    FrozenRecord,
    frozen_entries,
)
from aqtlite.program.serving.placeholder import Placeholder


@dataclasses.dataclass(frozen=True)
class ModuleVariables:
    """The variables of the module that makes a call."""

    path: tuple[str, ...]

    params: Mapping[str, Any]
    """The module's own parameters: floats, or `Placeholder`s if frozen."""

    frozen: Sequence[FrozenEntry]

    find: Callable[[str], Any]
    """Returns a parameter of any module by its path from the root, joined by slashes;
    None if the calling module does not see it."""

    records: Callable[[], Iterable[tuple[tuple[str, ...], FrozenRecord]]]
    """Returns the records of all modules' weights, each with its module's path."""

    def __str__(self) -> str:
        return "/".join(self.path) or "the root module"

    def name(self, name: str) -> str:
        """Returns the path of one of the module's parameters or frozen weights."""
        return "/".join((*self.path, name))

    def frozen_of_size(self, size: int) -> dict[str, Placeholder]:
        """Returns the frozen parameters with `size` elements, by path."""
        return {
            self.name(name): value
            for name, value in self.params.items()
            if isinstance(value, Placeholder) and math.prod(value.shape) == size
        }

    def frozen_parameter(self, x: Any) -> str | None:
        """Returns the path of a frozen parameter with the operand's size, or None."""
        return next(iter(self.frozen_of_size(x.size)), None)

    def has_float_parameter(self, size: int) -> bool:
        """Whether there is a float parameter with at least `size` elements."""
        return any(
            getattr(value, "size", 0) >= size
            for value in self.params.values()
            if not isinstance(value, Placeholder)
        )


def module_variables(scope: Scope) -> ModuleVariables:
    """Returns the variables of a module, unboxed except for `FrozenKernel`s.

    Raises:
        ValueError: if frozen weights were restored without a target.
    """
    variables = scope.variables()
    params = {
        name: unboxed(value)
        for name, value in variables.get("params", {}).items()
        if not isinstance(value, Mapping)
    }
    guards.check_restored(variables.get(COLLECTION, {}))
    frozen = [
        one._replace(values=nn.meta.unbox(one.values))
        for one in frozen_entries(variables.get(COLLECTION, {}))
        if not one.module
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
    return unboxed(node)


def _records(root: Scope) -> list[tuple[tuple[str, ...], FrozenRecord]]:
    """Returns the records of weights below a root, each with its module's path."""
    entries = frozen_entries(root.variables().get(COLLECTION, {}), root.path)
    return [(one.module, one.record) for one in entries]
