"""Calls of Linen modules in which injected contractions run in float."""

from collections.abc import Callable
from typing import Any

from flax import linen as nn
from flax.core import Scope, freeze

_FLAG = "aqt_in_float"


def is_asked(scope: Scope | None) -> bool:
    """Whether contractions of a module are to run in float."""
    return scope is not None and bool(scope.get_flag(_FLAG, False))


def method(of: Any = None) -> Callable[..., Any]:
    """The ``method=`` of an `apply` in which injected contractions run in float.

    Args:
        of: the method to call: its name, a function, or None for ``__call__``.
    """

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        scope = module.scope
        if scope is None:
            raise ValueError(f"{type(module).__name__} was called outside of apply")
        # Flax hands flags down to the scopes of submodules, through its transformations
        # and past its caches of traces.
        scope.flags = freeze({**scope.flags, _FLAG: True})
        if of is None:
            return module(*args, **kwargs)
        if isinstance(of, str):
            return getattr(module, of)(*args, **kwargs)
        return getattr(of, "__func__", of)(module, *args, **kwargs)

    return call
