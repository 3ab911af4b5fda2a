"""What layers take: functions to inject, and not their classes."""

import functools
from typing import Any, TypeVar

import jax
import numpy as np

_Class = TypeVar("_Class", bound=type[Any])


def injectable(cls: _Class) -> _Class:
    """Makes a class tell when a layer was given it for an instance, or the reverse.

    A layer calls a function that it was given with arrays, and a class without any
    argument. Python's own errors are about the arguments of the one or the other.

    Args:
        cls: its constructor takes a config, and its instances are functions of arrays.
    """
    name, init, call = cls.__name__, cls.__init__, cls.__call__
    remedy = (
        f"a layer takes {name}(cfg), and functools.partial({name}, cfg) in a field "
        "with _cls at the end"
    )

    @functools.wraps(init)
    def checked_init(self: Any, *args: Any, **kwargs: Any) -> None:
        if any(isinstance(x, jax.Array | np.ndarray) for x in args):
            raise TypeError(f"the class {name} was called with arrays: {remedy}")
        if not args and not kwargs:
            raise TypeError(f"{name} was built without a config: {remedy}")
        init(self, *args, **kwargs)

    @functools.wraps(call)
    def checked_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs:
            raise TypeError(f"{name}(cfg) was called without operands: {remedy}")
        return call(self, *args, **kwargs)

    cls.__init__, cls.__call__ = checked_init, checked_call
    return cls
