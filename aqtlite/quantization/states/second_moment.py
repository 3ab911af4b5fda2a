"""Second moments of inputs: the statistics of roundings at conversion (`config.Gptq`).

They are gathered as the statistics of calibrations are, in a record with a number of
batches, but only a conversion reads them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from aqtlite.calibration import counting
from aqtlite.lowering import exact
from aqtlite.operations import Operation, inputs
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization.states import state_checks
from aqtlite.shapes.sharding import replicated


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SecondMoment:
    """Sums of products of the inputs of a contraction, over the rows of all batches."""

    batches: jax.Array
    """Number of batches, float32."""

    moment: jax.Array
    """Sums of ``x_i x_j``, float32, of shape ``(groups, inputs, inputs)``. The groups
    are the batch indices, feature groups or experts of the weights."""


def init(operation: Operation, rhs_shape: tuple[int, ...]) -> SecondMoment:
    """Returns the second moment of no rows.

    Args:
        operation: forward contraction.
        rhs_shape: shape of the weights.

    Raises:
        ValueError: if the weights of the contraction cannot be rounded.
    """
    groups, count, _ = inputs.Matrices.of(operation, rhs_shape).shape
    zeros = jnp.zeros((groups, count, count), jnp.float32)
    return SecondMoment(counting.no_batches(), zeros)


def update(
    state: Any,
    operation: Operation,
    lhs: Any,
    rhs: Any,
    mask: jax.Array | None = None,
) -> Any:
    """Returns the second moment after one more batch; one not finite changes nothing.

    Args:
        state: `SecondMoment` of the batches before.
        operation: forward contraction.
        lhs: batch of inputs.
        rhs: weights; with a `QTensor`, frozen weights, the state is unchanged.
        mask: bool of the shape of lhs, True for elements that count; None for all. A
            batch with none changes nothing.

    Raises:
        ValueError: if the batches before had another shape.
        TypeError: if the state was cast.
    """
    if isinstance(rhs, QTensor) or not isinstance(state, SecondMoment):
        return state
    state_checks.check_float32(state, "fwd.rhs.rounding")
    if isinstance(lhs, QTensor):
        lhs = lhs.dequant()
    fixed = exact.float32(jax.lax.stop_gradient(lhs))
    if mask is None:
        found = inputs.second_moment(operation, replicated(fixed), rhs.shape)
    else:
        found = inputs.masked_second_moment(
            operation, replicated(fixed), replicated(mask), rhs.shape
        )
    if found.shape != state.moment.shape:
        raise ValueError(
            "fwd.rhs.rounding gathers the second moment of the inputs, of shape "
            f"{state.moment.shape} in the batches before and {found.shape} in this "
            "one: the operands have another shape. A contraction of two activations "
            "has no weights to round: set fwd.rhs.rounding to None there"
        )
    after = SecondMoment(state.batches + 1, state.moment + found)
    enters = jnp.isfinite(_powers(found)).all()
    if mask is not None:
        enters &= jnp.any(mask)
    return counting.chosen(enters, after, state)


def may_be_finite(state: SecondMoment) -> bool:
    """Whether a second moment is finite, or not known to hold NaN or infinities."""
    if isinstance(state.moment, jax.core.Tracer):
        return True
    return bool(jnp.isfinite(_powers(state.moment)).all())


def _powers(moment: jax.Array) -> jax.Array:
    """The power of each input. One that is not finite makes its own power so."""
    return jnp.diagonal(moment, axis1=-2, axis2=-1)


def merged(one: SecondMoment, other: SecondMoment) -> SecondMoment:
    """Returns the second moment of the batches of both."""
    return jax.tree.map(jnp.add, one, other)


def of_steps(state: SecondMoment, num_steps: int) -> SecondMoment:
    """Returns second moments of the steps of some scans, added over the others' steps.

    Args:
        state: a second moment, stacked along the steps of scans, outermost first.
        num_steps: number of the innermost scans whose steps stay apart.
    """

    def of(x: jax.Array, ndim: int) -> jax.Array:
        return x.sum(tuple(range(x.ndim - ndim - num_steps)))

    return SecondMoment(of(state.batches, 0), of(state.moment, 3))


def without(tree: Any) -> Any:
    """Returns nested mappings of statistics without second moments."""
    if not isinstance(tree, dict):
        return tree
    kept = {
        name: without(value)
        for name, value in tree.items()
        if not isinstance(value, SecondMoment)
    }
    return {
        name: value for name, value in kept.items() if value != {} or tree[name] == {}
    }
