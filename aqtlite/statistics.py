"""The statistics of calibrations that gather them, kept by the caller.

A calibration with state sees every batch of its operand. The state is a pytree of
arrays for each operand, ``()`` for one without: a framework (or a training loop) keeps
it, updates it with the batch, and hands it to the contraction. `aqtlite.flax` keeps it
in a collection.

>>> import jax.numpy as jnp
>>> from aqtlite import config
>>> cfg, matmul = config.fully_quantized(), (((1,), (0,)), ((), ()))
>>> init_states(cfg, jnp.ones((2, 3)), jnp.ones((3, 4)), matmul)
((), ())

Beside the state, the number of batches is counted: before the first one a contraction
raises, and gives NaN under `jax.jit`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import config, granularity
from aqtlite import dimension_numbers as dn
from aqtlite.lowering import exact
from aqtlite.qtensor import QTensor

States = tuple[Any, Any]
"""Of lhs and rhs."""


def has_states(cfg: config.DotGeneral) -> bool:
    """Returns True if a calibration of the forward contraction gathers statistics."""
    sides = cfg.fwd.lhs, cfg.fwd.rhs
    return any(one.is_quantized and one.calibration.has_state for one in sides)


def init_states(
    cfg: config.DotGeneral, lhs: Any, rhs: Any, dimension_numbers: Any
) -> States:
    """The statistics of a contraction before the first batch.

    Args:
        cfg: of the contraction.
        lhs: an operand, or its shape and dtype.
        rhs: the other one.
        dimension_numbers: as `jax.lax.dot_general` takes them.

    Returns:
        A state for each operand, ``()`` for one whose calibration has none.
    """
    (lhs_ca, rhs_ca), _ = dn.canonicalize(dimension_numbers, lhs.shape, rhs.shape)
    return (
        _init(cfg.fwd.lhs, lhs.shape, lhs_ca, "fwd.lhs"),
        _init(cfg.fwd.rhs, rhs.shape, rhs_ca, "fwd.rhs"),
    )


def update_states(
    cfg: config.DotGeneral, states: States, lhs: Any, rhs: Any, dimension_numbers: Any
) -> States:
    """The statistics of a contraction after one more batch.

    Args:
        cfg: of the contraction.
        states: as `init_states` returns them.
        lhs: an operand; a `QTensor` leaves its state as it is.
        rhs: the other one.
        dimension_numbers: as `jax.lax.dot_general` takes them.
    """
    (lhs_ca, rhs_ca), _ = dn.canonicalize(dimension_numbers, lhs.shape, rhs.shape)
    return (
        _update(cfg.fwd.lhs, states[0], lhs, lhs_ca, "fwd.lhs"),
        _update(cfg.fwd.rhs, states[1], rhs, rhs_ca, "fwd.rhs"),
    )


def _init(
    tensor: config.Tensor, shape: tuple[int, ...], axes: dn.Axes, path: str
) -> Any:
    if not (tensor.is_quantized and tensor.calibration.has_state):
        return ()
    if tensor.calib_shared_axes is None:
        raise ValueError(
            f"{path}.calibration={tensor.calibration!r} gathers statistics, but "
            f"{path}.calib_shared_axes is None: each row of a batch would have its own."
            f' Set {path}.calib_shared_axes to "per_tensor", or to all axes but those '
            "that mean the same in every batch"
        )
    shared = granularity.shared_axes(tensor, shape, axes, path)
    scale_shape = dn.shared_shape(shape, shared)
    state = tensor.calibration.init_state(scale_shape, tensor.grid)
    return {"batches": jnp.zeros((), jnp.int32), "state": state}


def _update(tensor: config.Tensor, state: Any, x: Any, axes: dn.Axes, path: str) -> Any:
    is_gathered = tensor.is_quantized and tensor.calibration.has_state
    if not is_gathered or isinstance(x, QTensor):
        return state
    shared = granularity.shared_axes(tensor, x.shape, axes, path)
    fixed = exact.float32(jax.lax.stop_gradient(x))
    return {
        "batches": state["batches"] + 1,
        "state": tensor.calibration.update(state["state"], fixed, shared, tensor.grid),
    }


def check_ready(tensor: config.Tensor, state: Any, path: str) -> None:
    """Raises ValueError if there is no state, or certainly one of no batch.

    Args:
        tensor: of one operand, whose calibration gathers statistics.
        state: of that operand.
        path: of its config, for the message.
    """
    if not jax.tree.leaves(state):
        raise ValueError(
            f"{path}.calibration={tensor.calibration!r} gathers statistics, and was "
            "given none: pass states= (aqtlite.statistics makes them), or use a "
            "calibration that looks at the array alone, such as calibration.AbsMax()"
        )
    batches = state["batches"]
    if not isinstance(batches, jax.core.Tracer) and not (np.asarray(batches) > 0).all():
        raise ValueError(
            f"{path}.calibration has no statistics yet: gather some, in Flax with "
            "aqtlite.flax.calibrate or model.apply(..., mutable=['aqt_stats'])"
        )
