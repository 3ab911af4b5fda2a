"""The statistics of the output gradient, which come back as their own gradient.

Whatever a training loop does to gradients, it may do to them: sum those of two
contractions, average over devices or accumulated batches, scale with the loss. No
statistic survives that, except that one process may take the largest values of
several: `jax.lax.pmax` over devices, `jnp.maximum` over batches. So they count their
uses, and beside each leaf is the square root of its magnitude, which a maximum keeps
and a mean does not: the root of a mean is larger than the mean of the roots. What was
averaged or scaled is refused at the next step.

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

# The roots of values that are averaged differ so much if the values do by 0.3 %. The
# mean of equal values, of any number of devices, is within it.
_TOLERANCE = np.float32(2.0**-20)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradientStatistics(Statistics):
    """Statistics of output gradients, which survive what happens to gradients."""

    roots: Any
    """Square roots of the magnitudes in `state`."""

    uses: jax.Array
    """float32: 1 after a backward pass, 0 before the first."""


def init(tensor: config.Tensor, ndim: int) -> Any:
    """The statistics before the first batch; ``()`` if there are none to gather.

    Args:
        tensor: config of the output gradient.
        ndim: rank of the output.
    """
    if not tensor.gathers_statistics:
        return ()
    first = counting.before_first(tensor.calibration, (1,) * ndim, tensor.grid)
    return _with_roots(first, jnp.zeros((), jnp.float32))


def update(tensor: config.Tensor, state: Any, gradient: jax.Array, path: str) -> Any:
    """The statistics after one more batch.

    Args:
        tensor: config of the output gradient, which has one scale.
        state: as `init` returns it.
        gradient: the output gradient.
        path: path of the config, for messages.

    Raises:
        ValueError: if the state is certainly of several contractions, devices or
            batches, or scaled; under `jax.jit` that gives NaN.
        TypeError: if the statistics were cast, or are none of gradients.
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
    """Statistics in the dtypes that the calibration uses."""
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
    """False where statistics are a sum, a mean or a multiple.

    Those of a gradient that is not finite are whole, and poison what they scale.
    """
    wanted = jax.tree.map(_root, statistics.state)
    differ = jax.tree.map(
        lambda root, found: (jnp.abs(root - found) > _TOLERANCE * root).any(),
        wanted,
        statistics.roots,
    )
    uses = statistics.uses
    return (uses == 0) | (uses == 1) & ~jnp.stack(jax.tree.leaves(differ)).any()
