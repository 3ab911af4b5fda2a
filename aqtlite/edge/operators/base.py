"""The interface of an operator of a full-integer program."""

import abc
from typing import Any, ClassVar

from aqtlite.edge.arithmetic.kernels import Kernels
from aqtlite.edge.grid import Grid, Quantized


class Operator(abc.ABC):
    """An operator: what it computes on floats, and on the integers of a file.

    Subclasses are frozen dataclasses of what is known before it runs.
    """

    name: ClassVar[str]
    """The name of the operator in tables and messages."""

    @property
    def name_in_rules(self) -> str:
        """The name of the operator in rules."""
        return self.name

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
    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """The output of inputs of floats, in the form that the converter recognises."""

    def simulate(
        self, output: Grid, kernels: Kernels, *args: Any, **kwargs: Any
    ) -> Any:
        """Integers of the output, as LiteRT computes them.

        Args:
            output: the grid of the output.
            kernels: whose arithmetic.
            *args: inputs: `Quantized`, or arrays of what has no grid.
            **kwargs: none; operators name their inputs.

        Raises:
            NotImplementedError: if the operator has no integers: its output is known,
                or stays in float.
        """
        raise NotImplementedError(f"{self.name_in_rules} has no integers")


class Moving(Operator):
    """The base of operators that do to integers what they do to floats.

    Their output holds elements of their inputs, which have one grid.
    """

    moves_values = True

    def simulate(self, output: Grid, kernels: Kernels, *inputs: Any) -> Any:
        return self.compute(
            *(x.qvalue if isinstance(x, Quantized) else x for x in inputs)
        )
