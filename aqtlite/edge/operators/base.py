"""The interface of an operator of a full-integer program, and shared parts."""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from aqtlite.edge.arithmetic.kernels import Kernels
from aqtlite.edge.grid import Grid, Quantized
from aqtlite.jaxpr import equations


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

    def compute_all(self, *args: Any) -> Sequence[Any]:
        """All outputs, of which equations may have several."""
        return [self.compute(*args)]

    def simulate(
        self, output: Grid, kernels: Kernels, *args: Any, **kwargs: Any
    ) -> Any:
        """Integers of the output, as LiteRT computes them.

        Args:
            output: the grid of the output.
            kernels: LiteRT kernels to simulate.
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


Activation = Literal["none", "relu", "relu6", "relu_n1_to_1"]

_LIMITS: dict[Activation, tuple[float, float]] = {
    "none": (-math.inf, math.inf),
    "relu": (0.0, math.inf),
    "relu6": (0.0, 6.0),
    "relu_n1_to_1": (-1.0, 1.0),
}


@dataclasses.dataclass(frozen=True)
class Activated(Operator):
    """The base of operators that may have an activation."""

    activation: Activation = dataclasses.field(default="none", kw_only=True)

    @property
    def clamp(self) -> tuple[float, float]:
        """The smallest and the largest value that the activation leaves."""
        return _LIMITS[self.activation]

    def compute(self, *inputs: Any) -> Any:
        return clip(self.before_activation(*inputs), *self.clamp)

    @abc.abstractmethod
    def before_activation(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the activation is applied to."""


def activation_of(low: float, high: float) -> Activation | None:
    """The activation that clips to a range; None if there is none."""
    found = (one for one, limits in _LIMITS.items() if limits == (low, high))
    return next(found, None)


def clip(x: jax.Array, low: float, high: float) -> jax.Array:
    """Clips to a range that may be open, in the form that converters recognise."""
    if low > -math.inf:
        x = jnp.maximum(x, jnp.asarray(low, x.dtype))
    if high < math.inf:
        x = jnp.minimum(x, jnp.asarray(high, x.dtype))
    return x


@dataclasses.dataclass(frozen=True, eq=False)
class Equation(Operator):
    """An equation as JAX traced it."""

    eqn: Any
    jaxpr: Any
    """Any jaxpr, whose other fields the equation is evaluated with."""

    name = "equation"

    @property
    def name_in_rules(self) -> str:
        return self.primitive

    @property
    def primitive(self) -> str:
        """The name of the primitive."""
        return str(self.eqn.primitive.name)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the primitive."""
        return dict(self.eqn.params)

    def compute(self, *inputs: Any) -> Any:
        (result,) = self.compute_all(*inputs)
        return result

    def compute_all(self, *inputs: Any) -> list[Any]:
        return equations.evaluate(self.jaxpr, self.eqn, inputs)
