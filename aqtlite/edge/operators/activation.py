"""Activations that an operator applies to its result before it is rounded."""

import dataclasses
import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from aqtlite.edge.operators.base import Operator

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


def of_limits(low: float, high: float) -> Activation | None:
    """The activation that clips to a range; None if there is none."""
    for activation in get_args(Activation):
        if _LIMITS[activation] == (low, high):
            found: Activation = activation
            return found
    return None


def clip(x: jax.Array, low: float, high: float) -> jax.Array:
    """Clips to a range that may be open, in the form that converters recognise."""
    if low > -math.inf:
        x = jnp.maximum(x, jnp.asarray(low, x.dtype))
    if high < math.inf:
        x = jnp.minimum(x, jnp.asarray(high, x.dtype))
    return x
