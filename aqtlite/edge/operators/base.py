"""The interface of an operator of a full-integer program."""

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

import jax

from aqtlite.edge.arithmetic.kernels import Kernels
from aqtlite.edge.grid import Grid


class Operator(abc.ABC):
    """An operator: what it computes on floats, and on the integers of a file.

    Subclasses are frozen dataclasses of what is known before it runs.
    """

    name: ClassVar[str]
    """The name of the operator in rules, tables and messages."""

    @abc.abstractmethod
    def compute(self, *inputs: jax.Array) -> Any:
        """The output, of floats; in the form that the converter recognises."""

    @property
    def is_compound(self) -> bool:
        """True if it is several operations of JAX, which a converter makes one of."""
        return False

    @property
    def moves_values(self) -> bool:
        """Whether the output holds elements of the inputs, and has their grid."""
        return False

    def fixed_grid(self, dtype: str) -> Grid | None:
        """Grid of the output, if the runtime demands one."""
        del dtype
        return None

    @abc.abstractmethod
    def simulate(
        self,
        inputs: Sequence[Any],
        grids: Sequence[Any],
        output: Grid,
        kernels: Kernels,
    ) -> jax.Array:
        """Integers of the output, as LiteRT computes them.

        Args:
            inputs: integers, or what is not quantized.
            grids: grids of the inputs; None for what is not quantized.
            output: the grid of the output.
            kernels: whose arithmetic.
        """


class Moving(Operator):
    """The base of operators that do to integers what they do to floats.

    Their output holds elements of their inputs, which have one grid.
    """

    @property
    def moves_values(self) -> bool:
        return True

    def simulate(
        self,
        inputs: Sequence[Any],
        grids: Sequence[Any],
        output: Grid,
        kernels: Kernels,
    ) -> jax.Array:
        moved: jax.Array = self.compute(*inputs)
        return moved
