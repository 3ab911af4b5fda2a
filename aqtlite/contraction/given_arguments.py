"""Errors for functions that a layer calls with the arguments of another one."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

_PLACES = (
    "layers take make_dot_general(cfg) as dot_general=, and "
    "make_conv_general_dilated(cfg) as conv_general_dilated="
)

_IN_PLACE_OF_DIMENSION_NUMBERS = ("window_strides", "group_sizes")
"""Third arguments of the functions of other operations than a dot_general."""


def checks_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Names a function of `contract.with_config` in the error for wrong arguments."""
    return checking_arguments(function, f"make{function.__name__}(cfg)", _PLACES)


def checking_arguments(
    function: Callable[..., Any], name: str, places: str
) -> Callable[..., Any]:
    """Names a function in the error for the arguments of another one.

    Layers and `jnp.einsum` call what they are given with their own arguments, and
    other errors would not say which function was meant.

    Args:
        function: the function.
        name: its name in errors.
        places: what layers take, and where.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
            for argument in _IN_PLACE_OF_DIMENSION_NUMBERS:
                _check_is_flat(argument, given.get(argument))
        except TypeError as error:
            raise TypeError(
                f"{name} was called with the arguments of another function ({error}): "
                f"{places}"
            ) from error
        return function(*args, **kwargs)

    return checked


def _check_is_flat(argument: str, value: Any) -> None:
    """Raises TypeError for dimension numbers in place of some integers."""
    if isinstance(value, list | tuple) and any(
        isinstance(x, list | tuple) for x in value
    ):
        raise TypeError(f"{argument} are {value}, dimension numbers of a dot_general")
