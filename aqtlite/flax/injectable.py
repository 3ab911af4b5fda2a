"""Clear errors for injected functions passed as classes, and the reverse."""

import functools
from typing import Any, TypeVar

import jax
import numpy as np

from aqtlite.contraction.given_arguments import checking_arguments

_Class = TypeVar("_Class", bound=type[Any])

_PLACES = (
    "layers take AqtDotGeneral(cfg) as dot_general=, and AqtConvGeneralDilated(cfg) as "
    "conv_general_dilated="
)


def injectable(cls: _Class) -> _Class:
    """Adds clear errors for a class injected in place of an instance, or vice versa.

    A layer calls an injected function with arrays, and an injected class without
    arguments. Python's own errors would only mention wrong arguments, as they would for
    the function of another operation.

    Args:
        cls: class with a config as argument, and instances that take arrays.
    """
    name, init, call = cls.__name__, cls.__init__, cls.__call__
    call = checking_arguments(call, f"{name}(cfg)", _PLACES)
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


def check_equation(eqn: Any) -> None:
    """Raises TypeError for what stands in place of the equation of an `AqtEinsum`."""
    if not isinstance(eqn, str):
        raise TypeError(
            f"AqtEinsum takes an equation and arrays, got {type(eqn).__name__} "
            f"in place of the equation: {_PLACES}"
        )
