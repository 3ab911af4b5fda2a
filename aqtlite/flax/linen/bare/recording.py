"""Calls of injected functions, recorded while Flax runs a model for a conversion.

A recording is a user context of JAX, part of the cache keys of `jax.jit` and `nn.jit`:
a conversion always traces anew, and no later call reuses what it traced.
"""

import contextlib
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


def store(operand: StoredOperand, caller: Caller) -> None:
    """Makes an operand an output of the trace, if the module has no `obstacle`.

    Transformations around the module stack it as they stack its parameters.
    """
    if caller.scope is not None:
        before = caller.scope.get_variable(COLLECTION, _RECORDED, ())
        caller.scope.put_variable(COLLECTION, _RECORDED, (*before, operand))


def stored_operands(collection: Any) -> list[StoredOperand]:
    """Returns the operands that modules stored in the collection during a trace."""
    stored = jax.tree.leaves(collection, is_leaf=lambda node: isinstance(node, tuple))
    return [node for nodes in stored for node in nodes]
