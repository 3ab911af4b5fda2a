"""The Linen module that makes a call, and whether it runs in float.

Frozen weights belong to the module that *calls* a contraction, not to the called
object: layers with scopes of their own may share one `AqtDotGeneral`.

That contractions run in float is a user context of JAX, part of the cache keys of
`jax.jit` and `nn.jit`: no later call reuses what was traced so.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from flax import errors
from flax import linen as nn
from flax.core import Scope, tracers

from aqtlite.program.serving.frozen_record import (
    COLLECTION,
)
from aqtlite.program.serving.placeholder import Placeholder


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
        return any(isinstance(unboxed(one), Placeholder) for one in params)

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


def unboxed(value: Any) -> Any:
    """Returns a variable without its box; a frozen parameter as it is."""
    return value if isinstance(value, Placeholder) else nn.meta.unbox(value)


_is_in_float = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def in_float() -> Iterator[None]:
    """Runs injected contractions inside the context in float."""
    with _is_in_float(True):
        yield


def is_in_float() -> bool:
    """Whether `in_float` is in effect."""
    return bool(_is_in_float.value)
