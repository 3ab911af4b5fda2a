"""One call of a model, as data."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, init=False)
class Call:
    """The arguments of ``model.apply(variables, *args, **kwargs)``.

    Arrays may be given as shapes (`jax.ShapeDtypeStruct`).

    >>> Call((2, 8), train=False, mutable=["cache"])
    Call(args=((2, 8),), kwargs={'train': False, 'mutable': ['cache']})
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __init__(self, *args: Any, **kwargs: Any):
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "kwargs", kwargs)
