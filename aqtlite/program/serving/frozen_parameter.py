"""The node that replaces a frozen parameter of a function or an NNX model."""

import dataclasses
import functools
from typing import Any

import jax

from aqtlite.program.serving.placeholder import Placeholder

_REMEDY = (
    "call what the conversion returned beside the serving parameters, "
    "serve(serving, *args); other functions take float parameters"
)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["marker"],
    meta_fields=["shape", "dtype", "number", "sliced", "spec", "path"],
)
@dataclasses.dataclass(frozen=True)
class FrozenParameter(Placeholder):
    """A placeholder for a frozen parameter.

    Its only leaf is `marker`, with respect to which no gradient exists: asking for it
    raises.
    """

    @property
    def sharding(self) -> jax.sharding.PartitionSpec:
        """An empty spec; without one, NNX would shard the value as an array."""
        return jax.sharding.PartitionSpec()

    def why_unreadable(self) -> str:
        return f"parameter {self.path!r} is frozen: {_REMEDY}"

    def __getitem__(self, index: Any) -> Any:
        """Refuses to be read, as by an NNX layer that reads its kernel.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"a parameter of shape {self.shape} is frozen, and has no values here: "
            "call the serving model, not a layer of it, and a method that was converted"
        )


def check_none(function: str, args: Any) -> None:
    """Checks that the arguments of a quantized function have no frozen parameter.

    Args:
        function: name of the function.
        args: its arguments.

    Raises:
        TypeError: if one is frozen.
    """
    for one in jax.tree.leaves(args, is_leaf=_is_frozen):
        if _is_frozen(one):
            raise TypeError(
                f"the quantized function {function} was called with serving parameters "
                f"(parameter {one.path!r} is frozen): {_REMEDY}"
            )


def _is_frozen(x: Any) -> bool:
    return isinstance(x, FrozenParameter)
