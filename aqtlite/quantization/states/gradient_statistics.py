"""The statistics of the output gradient, returned as their own gradient.

A training loop may treat them like any gradient: sum those of two contractions, average
them over devices or accumulated batches, scale them with the loss. No statistic
survives that, but a maximum is fine: `jax.lax.pmax` over devices, `jnp.maximum` over
batches. To detect the rest, the statistics count their uses, and store the square root
of each leaf's magnitude: the root of a maximum is the maximum of the roots, but the
root of a mean is larger than the mean of the roots. Statistics that were averaged or
scaled are refused at the next step.

All leaves are floats, since integers have no gradient.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import config
from aqtlite.calibration import Statistics, counting
from aqtlite.lowering import exact
from aqtlite.quantization.states import state_checks

# Averaging exceeds the tolerance if the values differ by 0.3 %. The mean of equal
# values, over any number of devices, stays within it.
_TOLERANCE = np.float32(2.0**-20)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradientStatistics(Statistics):
    """Statistics of output gradients that reveal if they were averaged or scaled."""

    roots: Any
    """Square roots of the magnitudes in `state`."""

    uses: jax.Array
    """float32: 1 after a backward pass, 0 before the first."""


def init(tensor: config.Tensor, ndim: int) -> Any:
    """Returns the statistics before the first batch; ``()`` if none are gathered.

    Args:
        tensor: config of the output gradient.
        ndim: rank of the output.
    """
    if not tensor.gathers_statistics:
        return ()
    first = counting.before_first(tensor.calibration, (1,) * ndim, tensor.grid)
    return _with_roots(first, jnp.zeros((), jnp.float32))


def update(tensor: config.Tensor, state: Any, gradient: jax.Array, path: str) -> Any:
    """Returns the statistics after one more batch; one not finite changes nothing.

    Args:
        tensor: config of the output gradient, which has one scale.
        state: as `init` returns it.
        gradient: the output gradient.
        path: path of the config, for messages.

    Raises:
        ValueError: if the state was summed, averaged or scaled; under `jax.jit` it
            becomes NaN instead; or if it is of another calibration.
        TypeError: if the state was cast, or is not `GradientStatistics`.
    """
    if not isinstance(state, GradientStatistics):
        raise TypeError(
            f"the statistics of {path} must be GradientStatistics, got "
            f"{type(state).__name__}: take those that model.init makes, or what "
            "aqtlite.restored_statistics makes of a checkpoint's"
        )
    found = {leaf.dtype.name for leaf in jax.tree.leaves(state)}
    if found != {"float32"}:
        raise TypeError(
            f"the statistics of {path} are {', '.join(sorted(found))}, but have to be "
            "float32: cast the parameters, not the collection "
            "'_overwrite_with_gradient'"
        )
    name = f"{path}.calibration"
    state_checks.check_form(
        tensor.calibration, tensor.grid, state.state, name, gradient.ndim
    )
    is_whole = _is_whole(state)
    if not isinstance(is_whole, jax.core.Tracer) and not is_whole.all():
        raise ValueError(
            f"the statistics of {path} are a sum or a mean of those of several "
            "contractions, devices or batches, or scaled: give each contraction its "
            "own (in nn.scan lift the collection '_overwrite_with_gradient' along an "
            "axis, as 'params'), and neither average it nor scale it with the loss. "
            "Over devices take its largest values, jax.lax.pmax; from batch to batch "
            "hand it on"
        )
    batches = jnp.where(is_whole, state.batches, jnp.float32(np.nan))
    axes = tuple(range(gradient.ndim))
    fixed = exact.float32(jax.lax.stop_gradient(gradient))
    before = typed(tensor, state, gradient.ndim)
    after = counting.updated(
        tensor.calibration,
        Statistics(batches, before.state),
        fixed,
        axes,
        tensor.grid,
    )
    return _with_roots(after, jnp.ones_like(state.uses))


def typed(tensor: config.Tensor, statistics: Statistics, ndim: int) -> Statistics:
    """Casts statistics to the dtypes that the calibration uses."""
    init = jax.eval_shape(
        lambda: tensor.calibration.init_state((1,) * ndim, tensor.grid)
    )
    cast = jax.tree.map(
        lambda leaf, like: leaf.astype(like.dtype), statistics.state, init
    )
    return Statistics(statistics.batches, cast)


def _with_roots(statistics: Statistics, uses: jax.Array) -> GradientStatistics:
    state = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), statistics.state)
    return GradientStatistics(
        statistics.batches, state, jax.tree.map(_root, state), uses
    )


def _root(leaf: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.abs(leaf))


def _is_whole(statistics: GradientStatistics) -> jax.Array:
    """Whether statistics are neither a sum, nor a mean, nor a multiple.

    Statistics that are not finite pass, and make the scale NaN.
    """
    wanted = jax.tree.map(_root, statistics.state)
    differ = jax.tree.map(
        lambda root, found: (jnp.abs(root - found) > _TOLERANCE * root).any(),
        wanted,
        statistics.roots,
    )
    uses = statistics.uses
    return (uses == 0) | (uses == 1) & ~jnp.stack(jax.tree.leaves(differ)).any()
