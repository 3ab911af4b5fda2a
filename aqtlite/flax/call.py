"""One call of a model, as data."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from aqtlite import errors


@dataclasses.dataclass(frozen=True, init=False)
class Call:
    """The arguments of a call of a model.

    In Linen, the arguments of ``model.apply(variables, *args, **kwargs)``; in NNX, the
    arguments of the model, and the name of the ``method`` if it is not ``"__call__"``.
    Arrays may be given as shapes (`jax.ShapeDtypeStruct`).

    >>> Call((2, 8), train=False, mutable=["cache"])
    Call(args=((2, 8),), kwargs={'train': False, 'mutable': ['cache']})
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __init__(self, *args: Any, **kwargs: Any):
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "kwargs", kwargs)


def calls_of(
    calls: Sequence[Call] | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Sequence[Call]:
    """Returns the calls given to `convert`, as `calls` or as arguments of one call.

    Raises:
        TypeError: if both are given, or `calls` is not a list of calls.
    """
    if calls is None:
        if any(isinstance(one, Call) for one in args):
            raise TypeError("convert takes calls as calls=[Call(x), ...]")
        return [Call(*args, **kwargs)]
    if args or kwargs:
        raise TypeError("convert takes either a call's arguments or calls=, not both")
    if not (isinstance(calls, list | tuple) and calls) or not all(
        isinstance(call, Call) for call in calls
    ):
        raise TypeError(
            "calls must be a list of aqtlite.flax.Call, such as "
            f"[Call(x), Call(x[:1])], got {errors.brief(calls)}"
        )
    return calls
