"""The Linen module that makes a call, its variables, and the mode of its calls.

Frozen weights belong to the module that *calls* a contraction, not to the called
object: layers with scopes of their own may share one `AqtDotGeneral`.

The modes, in which contractions are recorded or run in float, are user contexts of JAX,
part of the cache keys of `jax.jit` and `nn.jit`: a conversion always traces anew, and
no later call reuses what it traced.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from flax import errors
from flax import linen as nn
from flax.core import Scope, tracers

from aqtlite.program.serving import guards
from aqtlite.program.serving.contraction import Contraction
from aqtlite.program.serving.frozen_record import (
    COLLECTION,
    FrozenRecord,
    frozen_entries,
)
from aqtlite.program.serving.lookup import ModuleVariables
from aqtlite.program.serving.model import StoredOperand
from aqtlite.program.serving.placeholder import Placeholder

_RECORDED = "recorded"
"""Name of the variable with the arrays that a recorded module stores."""


class AqtContraction(nn.Module):
    """A child that Flax attaches to the module whose method is running.

    Its parent is the caller; the frozen weights are in the parent's scope.
    """

    def __post_init__(self):
        # Flax may refuse the child, but has set its parent by then. No other public
        # API gives the running module: should Flax check first in the future,
        # `find_caller` finds none, nothing is frozen, and the tests of this file
        # fail.
        refusals = errors.AssignSubModuleError, errors.NameInUseError
        with contextlib.suppress(*refusals):
            super().__post_init__()


class Caller(NamedTuple):
    """The module that makes a call."""

    module: nn.Module | None = None
    """None outside of modules."""

    scope: Scope | None = None
    is_inside: bool = False
    """Whether variables can be created or updated: not inside a `jax.jit` or another
    transformation that Flax does not know of, such as the one in `jnp.einsum`."""

    @property
    def variables(self) -> Scope | None:
        """The scope, if variables can be created or updated in it; or None."""
        return self.scope if self.is_inside else None

    @property
    def path(self) -> tuple[str, ...]:
        """Path of the module, empty outside of modules."""
        return () if self.scope is None else self.scope.path

    @property
    def serves(self) -> bool:
        """Whether the variables of the model have frozen weights."""
        scope = self.scope
        return scope is not None and not scope.root.is_collection_empty(COLLECTION)

    @property
    def has_serving_variables(self) -> bool:
        """Whether the variables of the model, or of the module, are of a conversion."""
        if self.scope is None or self.serves:
            return self.scope is not None
        params = self.scope.variables().get("params", {}).values()
        return any(isinstance(_unboxed(one), Placeholder) for one in params)

    @property
    def obstacle(self) -> str | None:
        """Reason why nothing can be stored with the module, or None."""
        if self.scope is None:
            return "contracted outside of a Flax module"
        if not self.is_inside:
            return (
                "contracted inside a jax.jit, jax.vmap or another transformation of "
                "the module's own (jnp.einsum is one), which no variables can leave"
            )
        classes = type(self.module).mro()
        if any(cls.__module__.startswith("flax.nnx") for cls in classes):
            return "contracted inside an NNX module (nnx.bridge.to_linen)"
        if not self.scope.is_mutable_collection(COLLECTION):
            return (
                f"the collection '{COLLECTION}' is not lifted here. In nn.scan or "
                "nn.vmap lift it like 'params': variable_axes={'params': 0, "
                f"'{COLLECTION}': 0}}, or variable_broadcast=['params', "
                f"'{COLLECTION}']; in a nested Module.apply, nn.map_variables or "
                "nn.WeightNorm it cannot be"
            )
        return None

    def store(self, operand: StoredOperand) -> None:
        """Makes an operand an output of the trace, if the module has no `obstacle`.

        Transformations around the module stack it as they stack its parameters.
        """
        if self.scope is not None:
            before = self.scope.get_variable(COLLECTION, _RECORDED, ())
            self.scope.put_variable(COLLECTION, _RECORDED, (*before, operand))


def find_caller() -> Caller:
    """Returns the module whose method is running."""
    module = AqtContraction().parent
    if not isinstance(module, nn.Module) or module.scope is None:
        return Caller()
    is_inside = module.scope.trace_level == tracers.current_trace()
    return Caller(module, module.scope, is_inside)


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
    return _unboxed(node)


def _records(root: Scope) -> list[tuple[tuple[str, ...], FrozenRecord]]:
    """Returns the records of weights below a root, each with its module's path."""
    entries = frozen_entries(root.variables().get(COLLECTION, {}), root.path)
    return [(one.module, one.record) for one in entries]


def _unboxed(value: Any) -> Any:
    return value if isinstance(value, Placeholder) else nn.meta.unbox(value)


Recorder = Callable[[Contraction, Caller, int], Contraction]
"""Function from a contraction, its module and its position in the module to the
contraction to evaluate."""


class _Recording:
    """One recorded trace, with the number of contractions in each scope.

    The count restarts wherever Flax creates a new scope: at every call of a lifted
    transformation, and every time it traces the transformation's body.
    """

    def __init__(self, recorder: Recorder):
        self._recorder: Recorder | None = recorder
        self._scopes: dict[int, tuple[Scope | None, int]] = {}

    def record(self, contraction: Contraction, caller: Caller) -> Contraction:
        """Passes a contraction to the recorder with its position."""
        if self._recorder is None:
            return contraction
        scope = caller.scope
        # Keeping a reference to the scope prevents reuse of its id.
        _, position = self._scopes.get(id(scope), (scope, 0))
        self._scopes[id(scope)] = scope, position + 1
        return self._recorder(contraction, caller, position)

    def close(self) -> None:
        """Drops references to what was recorded; JAX's caches keep this object."""
        self._recorder = None
        self._scopes.clear()


_mode = jax.make_user_context(None)


@contextlib.contextmanager
def recorded_by(recorder: Recorder) -> Iterator[None]:
    """Passes contractions inside the context to a recorder instead of serving them."""
    recording = _Recording(recorder)
    try:
        with _mode(recording):
            yield
    finally:
        recording.close()


def is_recorded() -> bool:
    """Whether `recorded_by` is in effect."""
    return _mode.value is not None


def record(contraction: Contraction, caller: Caller) -> Contraction:
    """Passes a contraction to the recorder; returns the one to evaluate."""
    recording: _Recording = _mode.value
    return recording.record(contraction, caller)


_is_in_float = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def in_float() -> Iterator[None]:
    """Runs injected contractions inside the context in float."""
    with _is_in_float(True):
        yield


def is_in_float() -> bool:
    """Whether `in_float` is in effect."""
    return bool(_is_in_float.value)


def stored_operands(collection: Any) -> list[StoredOperand]:
    """Returns the operands that modules stored in the collection during a trace."""
    stored = jax.tree.leaves(collection, is_leaf=lambda node: isinstance(node, tuple))
    return [node for nodes in stored for node in nodes]
