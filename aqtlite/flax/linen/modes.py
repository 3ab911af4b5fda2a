"""Contexts in which injected contractions are recorded, or run in float.

They are user contexts of JAX, part of the cache keys of `jax.jit` and `nn.jit`: a
conversion always traces anew, and no later call reuses what it traced.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax.core import Scope

from aqtlite.flax.linen.caller import Caller
from aqtlite.program.serving.contraction import Contraction
from aqtlite.program.serving.frozen_record import COLLECTION
from aqtlite.program.serving.model import StoredOperand

_RECORDED = "recorded"
"""Name of the variable with the arrays that a recorded module stores."""


@dataclasses.dataclass(frozen=True)
class CallingModule:
    """The module that makes a call, while its model is traced."""

    path: tuple[str, ...]
    obstacle: str | None
    """Reason why nothing can be stored from here, if any."""

    store: Callable[[Any], None]
    """Function that makes a pytree an output of the trace, under the module's path.
    Transformations around the module stack it as they stack its parameters."""


Recorder = Callable[[Contraction, CallingModule, int], Contraction]
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

    def record(self, contraction: Contraction, caller: Caller | None) -> Contraction:
        """Passes a contraction to the recorder with its position."""
        if self._recorder is None:
            return contraction
        scope = None if caller is None else caller.scope
        # Keeping a reference to the scope prevents reuse of its id.
        _, position = self._scopes.get(id(scope), (scope, 0))
        self._scopes[id(scope)] = scope, position + 1
        return self._recorder(contraction, _calling_module(caller), position)

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


def record(contraction: Contraction, caller: Caller | None) -> Contraction:
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


def _calling_module(caller: Caller | None) -> CallingModule:
    def store(node: Any) -> None:
        if caller is not None:
            before = caller.scope.get_variable(COLLECTION, _RECORDED, ())
            caller.scope.put_variable(COLLECTION, _RECORDED, (*before, node))

    path = () if caller is None else caller.scope.path
    return CallingModule(path, _obstacle(caller), store)


def _obstacle(caller: Caller | None) -> str | None:
    """Returns why nothing can be stored with a module, or None."""
    if caller is None:
        return "contracted outside of a Flax module"
    if not caller.is_inside:
        return (
            "contracted inside a jax.jit, jax.vmap or another transformation of the "
            "module's own (jnp.einsum is one), which no variables can leave"
        )
    if any(cls.__module__.startswith("flax.nnx") for cls in type(caller.module).mro()):
        return "contracted inside an NNX module (nnx.bridge.to_linen)"
    if not caller.scope.is_mutable_collection(COLLECTION):
        return (
            f"the collection '{COLLECTION}' is not lifted here. In nn.scan or nn.vmap "
            "lift it like 'params': variable_axes={'params': 0, "
            f"'{COLLECTION}': 0}}, or variable_broadcast=['params', '{COLLECTION}']; "
            "in a nested Module.apply, nn.map_variables or nn.WeightNorm it cannot be"
        )
    return None
