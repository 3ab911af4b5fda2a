"""What a contraction saves for its gradients."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from aqtlite.contraction import dots
from aqtlite.contraction.straight_through import Estimator
from aqtlite.operations import SIDES, Operation
from aqtlite.qtensor.qtensor import Operand
from aqtlite.quantization.states.statistics import States


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residuals:
    """The residuals of the forward pass."""

    operation: Operation
    lhs: Operand
    """Needed by the gradient of rhs; `absent` if no gradient of rhs is asked for."""

    rhs: Operand
    estimators: tuple[Estimator | None, Estimator | None]
    """Estimators of lhs and rhs; None for a frozen operand, `absent` where no gradient
    is asked for."""

    seed: jax.Array | None
    scales: tuple[jax.Array | None, jax.Array | None]
    """Scales of lhs and rhs, which give equal gradients different noise."""

    states: States
    """States of the output gradient only."""

    scaled_shapes: tuple[tuple[int, ...], ...] = dataclasses.field(
        metadata={"static": True}
    )
    """Shapes of the operands of `scales`; empty for None."""


_ABSENT_SHAPE = (0, 0, 0)


def absent(tree: Any) -> Any:
    """Placeholders, in the same pytree structure, for residuals that are not needed.

    `jax.checkpoint` and `jax.jit` trace a function once, then differentiate it with
    respect to one operand or to both; JAX assumes that its residuals have one structure
    in all cases.
    """
    return jax.tree.map(lambda _: jnp.zeros(_ABSENT_SHAPE, bool), tree)


def is_absent(tree: Any) -> bool:
    """Whether any residual in a pytree is `absent`."""
    return any(
        leaf.shape == _ABSENT_SHAPE and leaf.dtype == bool
        for leaf in jax.tree.leaves(tree)
    )


def scales_on_output(saved: Residuals) -> tuple[jax.Array, ...]:
    """The scales that can multiply the output, in a shape that broadcasts with it."""
    operation = saved.operation
    return tuple(
        operation.scale_to_output(side, dots.of_elements(operation, side, scale, shape))
        for side, scale, shape in zip(
            SIDES, saved.scales, saved.scaled_shapes, strict=True
        )
        if scale is not None
        and all(scale.shape[axis] == 1 for axis in operation.axes(side).contracting)
    )
