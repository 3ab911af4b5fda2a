"""Checks of the states of calibrations that callers give."""

import functools
from typing import Any

import jax

from aqtlite import config
from aqtlite.calibration import Calibration, Statistics, counting
from aqtlite.numerics import Numerics
from aqtlite.quantization.states.fixed_scale import FixedScale


def check_given(tensor: config.Tensor, state: Any, path: str) -> None:
    """Raises ValueError if a calibration that needs a state was given none.

    Args:
        tensor: config of the operand.
        state: state of the operand.
        path: path of the config, for the message.
    """
    if jax.tree.leaves(state):
        return
    what = "is learned" if tensor.calibration.is_learned else "gathers statistics"
    raise ValueError(
        f"{path}.calibration={tensor.calibration!r} {what}, and was given no state: "
        "pass states= (aqtlite.statistics makes them; in Flax, model.init does), or "
        "use a calibration that looks at the array alone, such as calibration.AbsMax()"
    )


def check_statistics(tensor: config.Tensor, state: Any, path: str) -> None:
    """Checks that a state is of a calibration that gathers statistics.

    Args:
        tensor: config of the operand.
        state: state of the operand.
        path: path of the config, for the message.

    Raises:
        TypeError: if it is not `calibration.Statistics`.
        ValueError: if it is of another calibration, or for another grid.
    """
    if not isinstance(state, Statistics):
        raise TypeError(
            f"{path} takes calibration.Statistics, got {type(state).__name__}: "
            "aqtlite.restored_statistics makes them of what a checkpoint holds"
        )
    if jax.tree.structure(state.state) != _structure(tensor.calibration, tensor.grid):
        raise ValueError(
            f"{path}.calibration={tensor.calibration!r} was given statistics of "
            f"another calibration, or for another grid than {tensor.grid!r}: gather "
            "them again with this config"
        )


@functools.lru_cache(maxsize=1024)
def _structure(calibration: Calibration, grid: Numerics) -> Any:
    """Structure of the state of a calibration."""
    return jax.tree.structure(
        jax.eval_shape(functools.partial(calibration.init_state, (1,), grid))
    )


def check_ready(
    tensor: config.Tensor, state: Any, path: str, *, has_results: bool
) -> None:
    """Raises ValueError if statistics are missing, or known to be of no batch.

    Those of an operand that enters no element of the result, as an empty batch in
    `init`, are not read, and may be of no batch.

    Args:
        tensor: config of an operand with a calibration that gathers statistics.
        state: state of the operand.
        path: path of the config, for the message.
        has_results: whether the operand enters any element of the result.
    """
    check_given(tensor, state, path)
    if isinstance(state, FixedScale):
        return
    check_statistics(tensor, state, path)
    problem = counting.problem(state.batches)
    if problem is not None and has_results:
        is_gradient = path.startswith(("dlhs.lhs", "drhs.lhs"))
        remedy = counting.REMEDY_OF_GRADIENTS if is_gradient else counting.REMEDY
        raise ValueError(f"{path}.calibration has {problem}: {remedy}")
