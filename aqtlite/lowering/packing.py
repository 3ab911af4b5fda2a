"""Arguments that are known before a call, laid out once as its fastest form reads them.

The weights of a served model are such arguments (`aqtlite.compile_serving`). The forms
of a call that packs nothing would have to lay them out every time.
"""

import abc
from collections.abc import Hashable, Sequence

import jax

Packed = tuple[jax.Array, ...]


class Packing(abc.ABC):
    """How one argument of a function is packed, and the function of the packed one.

    Subclasses are frozen dataclasses.
    """

    argument: int
    """Index of the argument."""

    beside: tuple[int, ...] = ()
    """Indices of arguments that are packed with it."""

    @property
    @abc.abstractmethod
    def layout(self) -> Hashable:
        """Packings of equal layouts pack an argument alike."""

    @abc.abstractmethod
    def pack(self, args: Sequence[jax.Array]) -> Packed:
        """Packs the argument, and those beside it.

        Args:
            args: all arguments.
        """

    @abc.abstractmethod
    def run(self, packed: Packed, args: Sequence[jax.Array]) -> jax.Array:
        """Computes what the function computes, without reading what is packed.

        Args:
            packed: the packed argument.
            args: all arguments.
        """
