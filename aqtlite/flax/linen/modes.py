"""The modes in which contractions are recorded rather than served, or run in float.

A mode is part of what the caches of `jax.jit`, and so those of `nn.jit`, compare:
a conversion traces every call anew, and leaves nothing in what others trace.
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
"""The name of what a module stores in the collection while it is recorded."""


@dataclasses.dataclass(frozen=True)
class CallingModule:
    """The module that makes a call, while its model is traced."""

    path: tuple[str, ...]
    obstacle: str | None
    """The reason why nothing can be stored from here, if there is one."""

    store: Callable[[Any], None]
    """Makes a pytree an output of the trace, under the path of the module.
    Transformations around the module stack it as they stack its parameters."""


Recorder = Callable[[Contraction, CallingModule, int], Contraction]
"""Takes a contraction, its module and its position among the contractions of the
module; returns the contraction to go on with."""


class _Recording:
    """One recorded trace; counts the contractions of each scope.

    A scope is counted anew wherever Flax makes a new one: at every call of a lifted
    transformation, and every time it traces the body of one.
    """

    def __init__(self, recorder: Recorder):
        self._recorder: Recorder | None = recorder
        self._scopes: dict[int, tuple[Scope | None, int]] = {}

    def record(self, contraction: Contraction, caller: Caller | None) -> Contraction:
        """Hands a contraction on, with its position."""
        if self._recorder is None:
            return contraction
        scope = None if caller is None else caller.scope
        # The scope is kept, so that no other one gets its id.
        _, position = self._scopes.get(id(scope), (scope, 0))
        self._scopes[id(scope)] = scope, position + 1
        return self._recorder(contraction, _calling_module(caller), position)

    def close(self) -> None:
        """Lets go of what was recorded: caches keep the mode itself."""
        self._recorder = None
        self._scopes.clear()


_mode = jax.make_user_context(None)


@contextlib.contextmanager
def recorded_by(recorder: Recorder) -> Iterator[None]:
    """Hands contractions to a recorder while it lasts; they are not served."""
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
    """Hands a contraction to the recorder; returns the one to go on with."""
    recording: _Recording = _mode.value
    return recording.record(contraction, caller)


_is_in_float = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def in_float() -> Iterator[None]:
    """Runs injected contractions in float while it lasts."""
    with _is_in_float(True):
        yield


def is_in_float() -> bool:
    """Whether `in_float` is in effect."""
    return bool(_is_in_float.value)


def stored_operands(collection: Any) -> list[StoredOperand]:
    """Returns what all modules stored, given the collection after a trace."""
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
    """Returns why nothing can be stored with a module, if so."""
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
