"""The states of calibrations, which the caller keeps.

There are three kinds, each a pytree of arrays for an operand, ``()`` for an operand
without a state:

- Statistics of an operand of the forward contraction. A framework (or a training loop)
  keeps them, updates them with each batch, and passes them to the contraction.
- Parameters of a learned calibration. An optimizer trains them with the gradient of the
  loss.
- Statistics of the output gradient, which only the backward pass knows. Their
  "gradient" is the updated statistics, which replace them: the convention of
  `flax.linen.fp8_ops`, which `flax.training.train_state.TrainState` follows.

`aqtlite.flax` keeps all of them in collections.

>>> import jax.numpy as jnp
>>> from aqtlite import config
>>> cfg, matmul = config.fully_quantized(), (((1,), (0,)), ((), ()))
>>> init_states(cfg, jnp.ones((2, 3)), jnp.ones((3, 4)), matmul)
States(lhs=(), rhs=(), dlhs=(), drhs=(), ..., adapter=(), seed=None)

Statistics are records (`calibration.Statistics`) with a number of batches: with
statistics of no batch a contraction raises, or returns NaN under `jax.jit`. Statistics
of gradients can be used from the first batch. A checkpoint that is read without a
target has dictionaries in their place, which `aqtlite.restored_statistics` converts to
records.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from aqtlite import config
from aqtlite.calibration import Statistics, counting
from aqtlite.jaxpr import counted
from aqtlite.lowering import exact
from aqtlite.operations import SIDES, DotGeneral, OperandAxes, Operation, Side
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization import granularity
from aqtlite.quantization.preparation import preparation, smoothing
from aqtlite.quantization.states import (
    gradient_statistics,
    learned_parameters,
    second_moment,
    state_checks,
)
from aqtlite.quantization.states.fixed_scale import FixedScale
from aqtlite.quantization.states.second_moment import SecondMoment
from aqtlite.shapes import dimension_numbers as dn


class States(NamedTuple):
    """The states of a contraction, ``()`` where a calibration has none."""

    lhs: Any = ()
    """Statistics or parameters of lhs of the forward contraction."""

    rhs: Any = ()
    """Statistics or parameters of rhs of the forward contraction."""

    dlhs: Any = ()
    """Statistics of the output gradient in the contraction for the gradient of lhs."""

    drhs: Any = ()
    """Statistics of the output gradient in the contraction for the gradient of rhs."""

    smoothing: Any = ()
    """Statistics and scales of a smoothing (`quantization.preparation.smoothing`)."""
    out: Any = ()
    """Statistics of the result."""

    moment: Any = ()
    """Second moment of lhs, for a rounding of rhs at conversion; see
    `aqtlite.quantization.states.second_moment`."""

    adapter: Any = ()
    """Parameters of an adapter beside rhs, by name; contractions do not read them."""

    seed: jax.Array | None = None
    """Seed of the noise of a call by rules, uint32 of shape ``(2,)``; contractions do
    not read it."""


def reads_state(cfg: config.DotGeneral, side: Side) -> bool:
    """Returns True if an operand of the forward contraction is quantized with a state.

    The second moment of a rounding at conversion is none: weights of equal states are
    rounded once, by the moment of all their inputs.
    """
    tensor = cfg.fwd.lhs if side == "lhs" else cfg.fwd.rhs
    return tensor.is_learned or tensor.gathers_statistics or cfg.has_smoothing_state


def init_states(cfg: config.DotGeneral, lhs: Any, rhs: Any, contraction: Any) -> States:
    """Returns the states of a contraction before the first batch.

    Args:
        cfg: config of the contraction.
        lhs: left operand. A `jax.ShapeDtypeStruct` is enough if its scale is not
            learned; with smoothing, if neither scale is.
        rhs: right operand, like `lhs`.
        contraction: an `Operation`, or dimension numbers as in `jax.lax.dot_general`.

    Returns:
        A state for each operand, ``()`` where the calibration has none.

    Raises:
        ValueError: if each row of an operand would have its own state.
        TypeError: if a learned scale has no values to start from.
    """
    operation = _operation(contraction, lhs, rhs)
    lhs_axes, rhs_axes = map(operation.axes, SIDES)
    out_shape = operation.output_shape(lhs.shape, rhs.shape)
    smoothed: Any = ()
    first: Any = ()
    moment: Any = ()
    if cfg.fwd.rhs.rounding is not None:
        moment = second_moment.init(operation, tuple(rhs.shape))
    if cfg.fwd.smoothing is not None and cfg.fwd.smoothing.has_state:
        dims = smoothing.dims_of(operation)
        smoothed = smoothing.init_state(cfg.fwd.smoothing, lhs.shape, rhs.shape, dims)
    if cfg.fwd.is_prepared and cfg.has_parameters:
        for tensor, path in ((cfg.fwd.lhs, "fwd.lhs"), (cfg.fwd.rhs, "fwd.rhs")):
            if tensor.is_learned:
                learned_parameters.check_values(tensor, path, lhs, "fwd.lhs")
                learned_parameters.check_values(tensor, path, rhs, "fwd.rhs")
        # Learned parameters start from the operands that are quantized.
        if cfg.fwd.smoothing is not None and cfg.fwd.smoothing.has_state:
            dims = smoothing.dims_of(operation)
            first = smoothing.update_state(cfg.fwd.smoothing, smoothed, lhs, rhs, dims)
        lhs, rhs = preparation.prepare(cfg.fwd, operation, lhs, rhs, first)
    return States(
        _init(cfg.fwd.lhs, lhs, lhs_axes, "fwd.lhs"),
        _init(cfg.fwd.rhs, rhs, rhs_axes, "fwd.rhs"),
        gradient_statistics.init(cfg.dlhs.lhs, len(out_shape)),
        gradient_statistics.init(cfg.drhs.lhs, len(out_shape)),
        smoothed,
        init_output(cfg.out, out_shape),
        moment,
    )


def init_output(tensor: config.Tensor, shape: Sequence[int]) -> Any:
    """Returns the statistics of a result before the first batch.

    Args:
        tensor: ``cfg.out``.
        shape: shape of the result.
    """
    out = jax.ShapeDtypeStruct(tuple(shape), jnp.float32)
    return _init(tensor, out, _last_axis(out), "out")


def update_output(
    tensor: config.Tensor,
    state: Any,
    out: jax.Array | QTensor,
    name: str = "a contraction",
) -> Any:
    """Returns the statistics of a result after one more batch.

    Args:
        tensor: ``cfg.out``.
        state: ``states.out``.
        out: the result, floating, or a `QTensor` that carries its float array.
        name: name of the contraction, for messages.

    Raises:
        TypeError: if a `QTensor` carries no float array.
    """
    if not tensor.gathers_statistics:
        return state
    if isinstance(out, QTensor) and out.unrounded is None:
        raise TypeError(
            f"out is a QTensor of {out.qvalue.dtype} and shape {out.shape} without "
            "the float result, whose range its integers do not have; give the one "
            "that the contraction returned, before .stop_gradient()"
        )
    floats: jax.Array = out.unrounded if isinstance(out, QTensor) else out
    mask = counted.counted(floats, f"the result of {name}")
    return _update(tensor, state, floats, _last_axis(floats), "out", mask)


def merge_states(cfg: config.DotGeneral, states: States, others: States) -> States:
    """Merges the states of a contraction from different batches.

    This merges states from several hosts, or from devices inside `jax.shard_map`, each
    of which saw batches of its own. Under `jax.jit` there is nothing to merge.

    Args:
        cfg: config of the contraction.
        states: as `update_states` returns them. Parameters, and statistics of the
            output gradient, do not change.
        others: states from other batches.

    Raises:
        ValueError: if the statistics of a calibration depend on the order of batches.
    """
    if others.smoothing:
        raise ValueError(
            f"the statistics of fwd.smoothing={cfg.fwd.smoothing!r} cannot be merged: "
            "its scales are those of both operands of all batches. Gather them under "
            "jax.jit with batches sharded over the devices"
        )
    return states._replace(
        lhs=merge_state(cfg.fwd.lhs, states.lhs, others.lhs, "fwd.lhs"),
        rhs=merge_state(cfg.fwd.rhs, states.rhs, others.rhs, "fwd.rhs"),
        out=merge_state(cfg.out, states.out, others.out, "out"),
        moment=merge_state(cfg.fwd.rhs, states.moment, others.moment, "fwd.rhs"),
    )


def merge_state(tensor: config.Tensor, state: Any, other: Any, path: str) -> Any:
    """Merges the states of one operand, as `merge_states` does."""
    if isinstance(state, SecondMoment):
        return second_moment.merged(state, other)
    if not tensor.gathers_statistics:
        return state
    if isinstance(state, FixedScale) or isinstance(other, FixedScale):
        raise ValueError(_fixed_scale(tensor, path))
    return counting.merged(tensor.calibration, state, other, tensor.grid)


def records_of(tree: Any) -> list[tuple[Any, Any]]:
    """Returns each record of statistics, which counts its `batches`, with its path."""
    nodes = jax.tree.leaves_with_path(tree, is_leaf=_is_record)
    return [(path, node) for path, node in nodes if _is_record(node)]


def _is_record(x: Any) -> bool:
    return isinstance(x, Statistics | smoothing.SmoothingStatistics | SecondMoment)


def check_takes_batches(tree: Any) -> None:
    """Raises ValueError if statistics in a tree were replaced by their scales."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, FixedScale))
    if any(isinstance(leaf, FixedScale) for leaf in leaves):
        raise ValueError(_fixed("of activations"))


def _fixed(which: str) -> str:
    return (
        f"the statistics {which} were replaced by the scale that they gave, for "
        "serving, and no batch can be added to them: gather statistics with the "
        "variables of training, and convert again"
    )


def _fixed_scale(tensor: config.Tensor, path: str) -> str:
    return _fixed(f"of {path}.calibration={tensor.calibration!r}")


def _last_axis(x: Any) -> OperandAxes:
    return OperandAxes.of_contracting(x.ndim, tuple(range(x.ndim))[-1:])


def update_states(
    cfg: config.DotGeneral,
    states: States,
    lhs: Any,
    rhs: Any,
    contraction: Any,
    name: str = "a contraction",
) -> States:
    """Returns the states of a contraction after one more batch of its operands.

    Args:
        cfg: config of the contraction.
        states: as `init_states` returns them. Parameters, and statistics of the result
            (`update_output`) and of its gradient, do not change.
        lhs: left operand; for a `QTensor`, neither its state nor the state of a
            smoothing changes.
        rhs: right operand, like `lhs`.
        contraction: as in `init_states`.
        name: name of the contraction, for messages.

    Returns:
        The states; as they were where an operand is empty, or not finite.
    """
    if 0 in lhs.shape or 0 in rhs.shape:
        return states
    operation = _operation(contraction, lhs, rhs)
    lhs_axes, rhs_axes = map(operation.axes, SIDES)
    of_lhs, of_rhs = _masks(cfg, lhs, rhs, name)
    smoothed, moment = states.smoothing, states.moment
    if cfg.fwd.smoothing is not None and cfg.fwd.smoothing.has_state:
        dims = smoothing.dims_of(operation)
        masks = of_lhs, of_rhs
        smoothed = smoothing.update_state(
            cfg.fwd.smoothing, smoothed, lhs, rhs, dims, masks
        )
        if counting.is_known_zero(smoothed.batches):
            return states  # A first batch that is not finite enters nothing.
    # Ranges and moments are those of the operands that are quantized.
    if cfg.fwd.is_prepared:
        lhs, rhs = preparation.prepare(cfg.fwd, operation, lhs, rhs, smoothed)
    if cfg.fwd.rotation is not None:
        of_lhs, of_rhs = _mixed(of_lhs, lhs_axes), _mixed(of_rhs, rhs_axes)
    if cfg.fwd.rhs.rounding is not None:
        moment = second_moment.update(moment, operation, lhs, rhs, of_lhs)
    return states._replace(
        lhs=_update(cfg.fwd.lhs, states.lhs, lhs, lhs_axes, "fwd.lhs", of_lhs),
        rhs=_update(cfg.fwd.rhs, states.rhs, rhs, rhs_axes, "fwd.rhs", of_rhs),
        smoothing=smoothed,
        moment=moment,
    )


def _masks(
    cfg: config.DotGeneral, lhs: Any, rhs: Any, name: str
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns which elements of each operand count, where statistics need it."""
    is_smoothed, has_moment = cfg.has_smoothing_state, cfg.fwd.rhs.rounding is not None
    of_lhs = of_rhs = None
    if is_smoothed or has_moment or cfg.fwd.lhs.gathers_statistics:
        of_lhs = _mask(lhs, f"the lhs of {name}")
    if is_smoothed or cfg.fwd.rhs.gathers_statistics:
        of_rhs = _mask(rhs, f"the rhs of {name}")
    return of_lhs, of_rhs


def _mask(x: Any, name: str) -> jax.Array | None:
    return None if isinstance(x, QTensor) else counted.counted(x, name)


def _mixed(mask: jax.Array | None, axes: OperandAxes) -> jax.Array | None:
    """Returns which elements count after a rotation along contracting axes."""
    if mask is None:
        return None
    found = jnp.any(mask, axes.contracting, keepdims=True)
    return jnp.broadcast_to(found, mask.shape)


def _operation(contraction: Any, lhs: Any, rhs: Any) -> Operation:
    if isinstance(contraction, Operation):
        return contraction
    return DotGeneral.of(contraction, lhs.shape, rhs.shape)


def _init(tensor: config.Tensor, x: Any, axes: OperandAxes, path: str) -> Any:
    if tensor.is_learned:
        if path == "fwd.lhs" and tensor.calib_shared_axes is None:
            raise ValueError(_one_for_each_row(tensor, path, "is learned"))
        return learned_parameters.init(tensor, x, axes, path)
    if not tensor.gathers_statistics:
        return ()
    if tensor.calib_shared_axes is None:
        raise ValueError(_one_for_each_row(tensor, path, "gathers statistics"))
    shared = granularity.shared_axes(tensor, x.shape, axes, path)
    scale_shape = dn.shared_shape(x.shape, shared)
    return counting.before_first(tensor.calibration, scale_shape, tensor.grid)


def _one_for_each_row(tensor: config.Tensor, path: str, what: str) -> str:
    return (
        f"{path}.calibration={tensor.calibration!r} {what}, but "
        f"{path}.calib_shared_axes is None: each row of a batch would have its own."
        f' Set {path}.calib_shared_axes to "per_tensor", or to all axes but those '
        "that mean the same in every batch"
    )


def _update(
    tensor: config.Tensor,
    state: Any,
    x: Any,
    axes: OperandAxes,
    path: str,
    mask: jax.Array | None = None,
) -> Any:
    if not tensor.gathers_statistics or isinstance(x, QTensor):
        return state
    if isinstance(state, FixedScale):
        raise ValueError(_fixed_scale(tensor, path))
    state_checks.check_statistics(tensor, state, path, x.ndim)
    shared = granularity.shared_axes(tensor, x.shape, axes, path)
    fixed, how = exact.float32(jax.lax.stop_gradient(x)), tensor.calibration
    if mask is not None:
        return counting.masked(how, state, fixed, mask, shared, tensor.grid)
    return counting.updated(how, state, fixed, shared, tensor.grid)
