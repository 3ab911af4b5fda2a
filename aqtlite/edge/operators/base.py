"""The interface of operators of full-integer programs, and shared parts."""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeGuard

import jax
import jax.numpy as jnp

from aqtlite.edge.arithmetic.kernels import Kernels
from aqtlite.edge.grid import Grid, Quantized
from aqtlite.jaxpr import equations
from aqtlite.shapes.sharding import vary_together


class Operator(abc.ABC):
    """An operator: a computation on floats, and on the integers of a file.

    Subclasses are frozen dataclasses of static attributes.
    """

    name: ClassVar[str]
    """Name of the operator in tables and messages."""

    @property
    def name_in_rules(self) -> str:
        """Name of the operator in rules."""
        return self.name

    @property
    def is_compound(self) -> bool:
        """Whether `compute` is several JAX operations, which a converter fuses."""
        return False

    @property
    def moves_values(self) -> bool:
        """Whether the output is on the grid of the inputs, as in a reshape."""
        return False

    def fixed_grid(self, dtype: str) -> Grid | None:
        """Grid of the output, if the runtime requires a specific one."""
        del dtype
        return None

    @abc.abstractmethod
    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the output from floats, in a form that the converter recognises."""

    def compute_all(self, *args: Any) -> Sequence[Any]:
        """Computes all outputs; only equations may have several."""
        return [self.compute(*args)]

    def simulate(
        self, output: Grid, kernels: Kernels, *args: Any, **kwargs: Any
    ) -> Any:
        """Computes the integers of the output, bit for bit as LiteRT does.

        Args:
            output: grid of the output.
            kernels: LiteRT kernels to simulate.
            *args: inputs: `Quantized`, or arrays for inputs without a grid.
            **kwargs: unused; lets subclasses name their inputs.

        Raises:
            NotImplementedError: if the operator has no integer form, since its output
                is always known or in float.
        """
        raise NotImplementedError(f"{self.name_in_rules} has no integers")


class Moving(Operator):
    """Base of operators that move or select elements, integers and floats alike.

    All inputs and the output are on one grid.
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
    """Base of operators that can have a fused activation."""

    activation: Activation = dataclasses.field(default="none", kw_only=True)

    @property
    def clamp(self) -> tuple[float, float]:
        """Smallest and largest value of the activation."""
        return _LIMITS[self.activation]

    def compute(self, *inputs: Any) -> Any:
        return clip(self.before_activation(*inputs), *self.clamp)

    @abc.abstractmethod
    def before_activation(self, *inputs: Any, **kwargs: Any) -> Any:
        """Computes the output without the activation."""


def activation_of(low: float, high: float) -> Activation | None:
    """The activation that clips to a range; None if no activation does."""
    found = (one for one, limits in _LIMITS.items() if limits == (low, high))
    return next(found, None)


def clip(x: jax.Array, low: float, high: float) -> jax.Array:
    """Clips to a range, possibly infinite, in a form that converters recognise."""
    if low > -math.inf:
        x = jnp.maximum(x, jnp.asarray(low, x.dtype))
    if high < math.inf:
        x = jnp.minimum(x, jnp.asarray(high, x.dtype))
    return x


@dataclasses.dataclass(frozen=True, eq=False)
class Equation(Operator):
    """A JAX equation that has not been translated."""

    eqn: Any
    jaxpr: Any
    """Jaxpr to take all other fields from when the equation is evaluated."""

    name = "equation"

    @property
    def name_in_rules(self) -> str:
        return self.primitive

    @property
    def primitive(self) -> str:
        """Name of the primitive."""
        return str(self.eqn.primitive.name)

    @property
    def params(self) -> dict[str, Any]:
        """Parameters of the primitive."""
        return dict(self.eqn.params)

    def compute(self, *inputs: Any) -> Any:
        (result,) = self.compute_all(*inputs)
        return result

    def compute_all(self, *inputs: Any) -> list[Any]:
        # The equation was traced outside of the `jax.shard_map` that may evaluate it.
        inputs = vary_together(inputs)
        return equations.evaluate(self.jaxpr, self.eqn, inputs)


def is_transposed_convolution(operator: Operator) -> TypeGuard[Equation]:
    """Whether an operator is a transposed convolution, which stays an equation."""
    return (
        isinstance(operator, Equation)
        and operator.primitive == "conv_general_dilated"
        and any(step != 1 for step in operator.params["lhs_dilation"])
    )
