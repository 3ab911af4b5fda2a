"""Methods of the classes of NNX modules."""

import functools
from typing import Any

from flax import nnx


def names_of(base: type[nnx.Module]) -> list[str]:
    """Returns the names of the methods of a class, private ones too.

    Of those that Python or NNX calls, only ``__call__`` is among them.
    """
    names = [name for name in dir(base) if not name.startswith("__")]
    # `set_view` is how nnx.view sets attributes.
    own = [n for n in names if not hasattr(nnx.Module, n) and n != "set_view"]
    return [name for name in (*own, "__call__") if _is_method(_attribute(base, name))]


def is_private(name: str) -> bool:
    """Whether a method is for other methods of its class."""
    return name.startswith("_") and not name.startswith("__")


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
