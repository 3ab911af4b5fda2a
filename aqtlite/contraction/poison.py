"""Propagation of NaN where a static range would hide it.

A dynamic calibration sees NaN and infinities in an array and makes the scale NaN. With
a range known beforehand (statistics, learned scales, constants), rounding would turn a
NaN into some integer. So the scale or the result is multiplied by a factor, NaN where
an operand was not finite and otherwise 1:

- Statistics that can still be updated, which such a batch does not enter: the factor
  checks the whole operand. A training step that gathers statistics of largest
  magnitudes reduces over it anyway.
- Otherwise, as in serving, where a reduction over the activations would cost as much as
  a dynamic scale: the factor checks the first and last element of each row. That finds
  an earlier layer that returned nothing but NaN, for lack of statistics of its own.
  `config.Tensor.find_nan` checks the whole operand here, too.

The factor from the ends of rows multiplies the result, which keeps a factor for each
row of activations. Other factors multiply scales, which are computed in full before
anything reads them and are given in serving: the rest is then compiled alike in both
programs. Scales of possible weights are multiplied by the factor of the ends, too, and
frozen so: a served program has no float weight to check.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import config
from aqtlite.lowering import exact, fusion, reduction
from aqtlite.lowering.target import OnCpu, TargetDependent
from aqtlite.operations import OperandAxes
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization import barriers, granularity
from aqtlite.quantization.states.fixed_scale import FixedScale
from aqtlite.shapes.dimension_numbers import Axes
from aqtlite.shapes.sharding import explicit_spec


def marked(
    x: jax.Array,
    q: QTensor,
    tensor: config.Tensor,
    axes: OperandAxes,
    path: str,
    state: Any,
) -> tuple[QTensor, jax.Array | None]:
    """Makes the scale NaN where an operand was, or returns a factor of the result.

    Args:
        x: the operand.
        q: `x`, quantized.
        tensor: config of the operand, with a calibration that `is_blind`.
        axes: axes of the operand.
        path: path of `tensor`, as ``"fwd.rhs"``.
        state: state of the calibration.

    Returns:
        `q`, and the factor: float32, 1 or NaN, keepdims with size 1 along the
        contracting axes; None if `q.scale` already has every NaN.
    """
    is_weight = path == "fwd.rhs" and not axes.batch
    gathers = _gathers(tensor, state)
    if gathers:
        q = _with_factor(q, _of_whole(x, tensor, axes, path), tensor, path)
        if is_weight or not path.startswith("fwd"):
            return q, None
    factor = _of_rows(x, tensor, axes)
    if factor is None:
        return q, None
    # Only activations have statistics.
    is_own = not tensor.calibration.has_state and all(
        n in (1, m) for n, m in zip(factor.shape, q.scale.shape, strict=True)
    )
    if is_weight or is_own:
        return _with_factor(q, factor, tensor, path), None
    return q, _Computed()(factor)


def with_poisoned_scale(
    x: jax.Array,
    q: QTensor,
    tensor: config.Tensor,
    axes: OperandAxes,
    path: str,
    state: Any,
) -> QTensor:
    """Like `marked`, but the factor always multiplies the scale, never the result.

    The arguments are those of `marked`.
    """
    if _gathers(tensor, state):
        return _with_factor(q, _of_whole(x, tensor, axes, path), tensor, path)
    factor = _of_rows(x, tensor, axes)
    return q if factor is None else _with_factor(q, factor, tensor, path)


def _gathers(tensor: config.Tensor, state: Any) -> bool:
    """Whether statistics can still be updated, and ``find_nan`` is not set."""
    is_fixed = isinstance(state, FixedScale)
    return tensor.gathers_statistics and not is_fixed and not tensor.find_nan


def _of_whole(
    x: jax.Array, tensor: config.Tensor, axes: OperandAxes, path: str
) -> jax.Array:
    # The axes of the statistics, over which the calibration reduces anyway.
    shared = granularity.shared_axes(tensor, x.shape, axes, path)
    return _of_all(x, tuple(sorted({*shared, *axes.contracting})))


def _of_rows(
    x: jax.Array, tensor: config.Tensor, axes: OperandAxes
) -> jax.Array | None:
    if tensor.find_nan:
        return _of_all(x, axes.contracting)
    if explicit_spec(x) is not None or 0 in x.shape:
        return None
    return OfEnds(axes.contracting)(jax.lax.stop_gradient(x))


def _with_factor(
    q: QTensor, factor: jax.Array, tensor: config.Tensor, path: str
) -> QTensor:
    """Multiplies the scale, which stays behind a barrier if it was behind one."""
    for axis, (size, count) in enumerate(zip(factor.shape, q.scale.shape, strict=True)):
        if size not in (1, count):
            cut = (*factor.shape[:axis], count, -1, *factor.shape[axis + 1 :])
            factor = factor.reshape(cut).prod(axis + 1)
    scale = q.scale * factor
    if barriers.has_barrier(path, tensor):
        scale = fusion.barrier(scale)
    return dataclasses.replace(q, scale=scale)


def _of_all(x: jax.Array, axes: Axes) -> jax.Array:
    fixed = exact.float32(jax.lax.stop_gradient(x))
    return _one_or_nan(reduction.largest_magnitude(fixed, axes) < np.float32(np.inf))


def _one_or_nan(is_finite: jax.Array) -> jax.Array:
    return jnp.where(is_finite, jnp.float32(1), jnp.float32(np.nan))


@dataclasses.dataclass(frozen=True)
class OfEnds(TargetDependent):
    """1, or NaN where the first or the last element along some axes is not finite."""

    axes: Axes

    def reference(self, x):
        first, last = (
            x[
                tuple(
                    end if axis in self.axes else slice(None) for axis in range(x.ndim)
                )
            ]
            for end in (slice(0, 1), slice(-1, None))
        )
        return _one_or_nan(jnp.isfinite(first) & jnp.isfinite(last))

    def lowered(self, target, x):
        if target.partitions == 1:
            return self.reference(x)
        # The ends of a sharded axis would take communication between devices.
        shape = (1 if axis in self.axes else n for axis, n in enumerate(x.shape))
        return jnp.ones(tuple(shape), jnp.float32)


def is_factor_barrier(function: TargetDependent | None) -> bool:
    """Returns True if a function keeps a factor apart from what it multiplies."""
    return isinstance(function, _Computed)


@dataclasses.dataclass(frozen=True)
class _Computed(OnCpu):
    """A factor that XLA:CPU computes before the contraction.

    Otherwise it computes the ends of rows again where the result is used, from the sums
    of this layer and of all layers before, and keeps these sums until then. In serving
    as in training, since XLA may order the float sums behind it by what it computes.
    """

    def reference(self, factor):
        return factor

    def on_cpu(self, is_whole, factor):
        return fusion.barrier(factor)
