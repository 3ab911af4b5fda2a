"""Calls with NNX objects among the arguments, as functions of arrays."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Structure:
    """The arguments of a call, but for the arrays in them."""

    arguments: Any
    """Structure of ``(args, kwargs)``, whose leaves may be NNX objects."""

    graphdef: Any
    """The graph of the objects, which may share variables."""

    def call(
        self, fn: Callable[..., Any], state: Any, others: Sequence[Any]
    ) -> tuple[Any, Any]:
        """Calls a function with the arguments.

        Args:
            fn: the function, which may update the objects.
            state: the state of all objects.
            others: the other leaves of the arguments, and None for each object.

        Returns:
            The result of the function, and the state after the call.
        """
        nnx: Any = sys.modules["flax.nnx"]
        objects = nnx.merge(self.graphdef, state)
        given = iter(objects)
        leaves = [next(given) if x is None else x for x in others]
        args, kwargs = jax.tree.unflatten(self.arguments, leaves)
        out = fn(*args, **kwargs)
        return out, nnx.split(objects, graph=True)[1]


def leaves_of(given: Any) -> tuple[list[Any], Any]:
    """Returns the leaves of a pytree, of which NNX objects are some, and its structure.

    Args:
        given: the arguments of a call: ``(args, kwargs)``.
    """
    return jax.tree.flatten(given, is_leaf=is_object)


def is_object(x: Any) -> bool:
    """Whether a value is a module, an optimizer or another object of NNX with state."""
    # Where Flax has not been imported, which takes a while, there are none.
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    return isinstance(x, nnx.Module | nnx.Optimizer | nnx.Variable | nnx.RngStream)
