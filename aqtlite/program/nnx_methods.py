"""Methods of the classes of NNX modules."""

import functools
from typing import Any

from flax import nnx


def names_of(base: type[nnx.Module]) -> list[str]:
    """Returns the names of the public methods of a class, and ``__call__``."""
    public = [name for name in dir(base) if not name.startswith("_")]
    # `set_view` is how nnx.view sets attributes.
    own = [n for n in public if not hasattr(nnx.Module, n) and n != "set_view"]
    return [name for name in (*own, "__call__") if _is_method(_attribute(base, name))]


def _attribute(cls: type, name: str) -> Any:
    """Returns an attribute of a class without binding it, ignoring the metaclass."""
    return next((vars(c)[name] for c in cls.__mro__ if name in vars(c)), None)


def _is_method(x: Any) -> bool:
    if isinstance(x, staticmethod | classmethod | type):
        return False
    # nnx.jit and others make callable objects that bind as functions do.
    return isinstance(x, functools.partialmethod) or (
        callable(x) and hasattr(type(x), "__get__")
    )
