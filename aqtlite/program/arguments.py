"""Checks of the arguments of a call before it is traced."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def check(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    what: str,
) -> None:
    """Checks that a function takes arguments.

    Args:
        function: the function. One whose signature Python does not know takes any.
        args: arguments of the call.
        kwargs: the same.
        what: who calls the function, and how it is given the arguments.

    Raises:
        TypeError: if it does not take them.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        raise TypeError(f"{what}; {name} cannot be called so: {error}") from error
