"""The states of calibrations in an einsum; see `aqtlite.statistics`.

>>> import jax.numpy as jnp
>>> import aqtlite
>>> from aqtlite import config
>>> from aqtlite.contraction import einsum_states
>>> cfg, eqn = config.static_int8(), "btd,dhk->bthk"
>>> x, w = jnp.ones((2, 3, 4)), jnp.ones((4, 2, 5))
>>> states = einsum_states.init_states(cfg, eqn, x, w)
>>> states = einsum_states.update_states(cfg, states, eqn, x, w)
>>> aqtlite.einsum(eqn, x, w, cfg=cfg, states=states).shape
(2, 3, 2, 5)
"""

from collections.abc import Sequence
from typing import Any

from aqtlite import config
from aqtlite.contraction import einsum_path
from aqtlite.contraction.einsum import as_dot_general, as_operands, einsum
from aqtlite.contraction.einsum_path import Step
from aqtlite.qtensor.qtensor import dequantized
from aqtlite.quantization.states import statistics
from aqtlite.quantization.states.statistics import States


def init_states(
    cfg: config.DotGeneral, eqn: str, *operands: Any
) -> States | tuple[States, ...]:
    """The states of an einsum before the first batch.

    Args:
        cfg: config of the einsum.
        eqn: the equation.
        *operands: floating, or `QTensor`s; under `jax.eval_shape` shapes are enough.

    Returns:
        States as from `aqtlite.statistics.init_states`, for the operands of the
        contraction and the result of the equation; with three and more operands a
        tuple, one for each contraction. Learned scales of a result in between start
        from its float values.
    """

    def states_of(number: int, step: Step, lhs: Any, rhs: Any) -> States:
        own = step.config_of(cfg) or config.unquantized()
        lhs, rhs, operation, order = as_dot_general(step.equation, lhs, rhs)
        states = statistics.init_states(own, lhs, rhs, operation)
        shape = operation.output_shape(lhs.shape, rhs.shape)
        out = statistics.init_output(own.out, [shape[axis] for axis in order])
        return states._replace(out=out)

    return _of_steps(eqn, operands, states_of)


def update_states(
    cfg: config.DotGeneral,
    states: States | Sequence[States],
    eqn: str,
    *operands: Any,
) -> States | tuple[States, ...]:
    """The states of an einsum after one more batch of its operands.

    Args:
        cfg: config of the einsum.
        states: States, as `init_states` returns them. The states that
            `aqtlite.statistics.update_states` leaves alone do not change;
            `aqtlite.statistics.update_output` updates ``states.out``.
        eqn: the equation.
        *operands: floating, or `QTensor`s. Results in between are those in float.

    Raises:
        ValueError: if there is another number of states than of contractions.
    """
    count = len(einsum_path.steps_of(eqn, as_operands(operands)))
    before = einsum_path.states_of_steps(eqn, states, count)

    def states_of(number: int, step: Step, lhs: Any, rhs: Any) -> States:
        own = step.config_of(cfg) or config.unquantized()
        lhs, rhs, operation, _ = as_dot_general(step.equation, lhs, rhs)
        return statistics.update_states(own, before[number], lhs, rhs, operation)

    return _of_steps(eqn, operands, states_of)


def _of_steps(
    eqn: str, operands: Sequence[Any], states_of: Any
) -> States | tuple[States, ...]:
    """Returns what a function makes of each step, with results in float."""
    arrays = as_operands(operands)
    steps = einsum_path.steps_of(eqn, arrays)
    found = []

    def run(number: int, step: Step, lhs: Any, rhs: Any) -> Any:
        found.append(states_of(number, step, lhs, rhs))
        if step.is_last:
            return None
        return einsum(step.equation, *map(dequantized, (lhs, rhs)), cfg=None)

    einsum_path.contracted(steps, arrays, run)
    return found[0] if len(found) == 1 else tuple(found)
