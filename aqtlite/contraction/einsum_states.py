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

from typing import Any

from aqtlite import config
from aqtlite.contraction.einsum import as_dot_general
from aqtlite.quantization import statistics
from aqtlite.quantization.statistics import States


def init_states(cfg: config.DotGeneral, eqn: str, lhs: Any, rhs: Any) -> States:
    """The states of an einsum before the first batch.

    Args:
        cfg: config of the einsum.
        eqn: the equation.
        lhs: floating, or a `QTensor`; under `jax.eval_shape` a shape is enough.
        rhs: like `lhs`.

    Returns:
        States as from `aqtlite.statistics.init_states`, for the operands of the
        contraction and the result of the equation.
    """
    lhs, rhs, operation, order = as_dot_general(eqn, lhs, rhs)
    states = statistics.init_states(cfg, lhs, rhs, operation)
    shape = operation.output_shape(lhs.shape, rhs.shape)
    out = statistics.init_output(cfg.out, [shape[axis] for axis in order])
    return states._replace(out=out)


def update_states(
    cfg: config.DotGeneral, states: States, eqn: str, lhs: Any, rhs: Any
) -> States:
    """The states of an einsum after one more batch of its operands.

    Args:
        cfg: config of the einsum.
        states: States, as `init_states` returns them. The states that
            `aqtlite.statistics.update_states` leaves alone do not change;
            `aqtlite.statistics.update_output` updates ``states.out``.
        eqn: the equation.
        lhs: floating, or a `QTensor`.
        rhs: like `lhs`.
    """
    lhs, rhs, operation, _ = as_dot_general(eqn, lhs, rhs)
    return statistics.update_states(cfg, states, lhs, rhs, operation)
