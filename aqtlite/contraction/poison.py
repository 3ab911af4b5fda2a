"""NaN where a static range would hide it.

A calibration that looks at an array finds its NaN and infinities, and makes the scale
NaN. One whose range is known beforehand (statistics, learned scales, constants) sees
none, and rounding makes some integer of a NaN. So something is multiplied by 1, or by
NaN where an operand was not finite:

- with statistics that can still be updated, all of the operand counts. In a training
  step that gathers statistics of largest magnitudes, they are found anyway;
- otherwise, as in serving, where a reduction over the activations would cost as much as
  a dynamic scale, the ends of each row count: that finds a layer before that gave NaN
  alone, for want of its own statistics. `config.Tensor.find_nan` looks at all of it.

What is multiplied is the result, in which each row of activations has its own factor;
for what may be a weight it is the scale, which is frozen with it: a served program has
no float weight to look at, and is to be compiled as the trained one is.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import config
from aqtlite.lowering import exact, reduction
from aqtlite.lowering.target import TargetDependent
from aqtlite.operations import OperandAxes, Side
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization import granularity
from aqtlite.quantization.fixed_scale import FixedScale
from aqtlite.shapes.dimension_numbers import Axes
from aqtlite.shapes.sharding import explicit_spec


def factor(
    x: jax.Array, tensor: config.Tensor, axes: OperandAxes, path: str, state: Any
) -> jax.Array | None:
    """The factor of the result or of the scale, for an operand quantized here.

    Args:
        x: the operand.
        tensor: how it is quantized.
        axes: axes of the operand.
        path: where `tensor` stands, for error messages.
        state: state of the calibration.

    Returns:
        float32, 1 or NaN, keepdims with size 1 along the contracting axes; None if the
        scale is NaN where it has to be.
    """
    if not tensor.is_quantized or not tensor.calibration.is_blind:
        return None
    if tensor.find_nan:
        return _of_all(x, axes.contracting)
    if tensor.gathers_statistics and not isinstance(state, FixedScale):
        # The axes of the statistics, for which the reduction is there already.
        shared = granularity.shared_axes(tensor, x.shape, axes.contracting, path)
        return _of_all(x, tuple(sorted({*shared, *axes.contracting})))
    if explicit_spec(x) is not None or 0 in x.shape:
        return None
    return _OfEnds(axes.contracting)(jax.lax.stop_gradient(x))


def is_of_scale(
    factor: jax.Array, q: QTensor, tensor: config.Tensor, side: Side, axes: OperandAxes
) -> bool:
    """Whether a factor multiplies the operand's scale, and not the result.

    Args:
        factor: `factor` of the operand.
        q: the quantized operand.
        tensor: how it is quantized.
        side: which operand it is.
        axes: axes of the operand.
    """
    if side == "rhs" and not axes.batch:
        return True
    sizes = zip(factor.shape, q.scale.shape, strict=True)
    # Statistics are of activations, and a served scale may be another one.
    return not tensor.calibration.has_state and all(n in (1, m) for n, m in sizes)


def with_factor(q: QTensor, factor: jax.Array) -> QTensor:
    """Multiplies a scale by a factor; what shares a scale shares a NaN.

    Args:
        q: a quantized array.
        factor: `factor` of it.
    """
    for axis, (size, count) in enumerate(zip(factor.shape, q.scale.shape, strict=True)):
        if size not in (1, count):
            cut = (*factor.shape[:axis], count, -1, *factor.shape[axis + 1 :])
            factor = factor.reshape(cut).prod(axis + 1)
    return dataclasses.replace(q, scale=q.scale * factor)


def _of_all(x: jax.Array, axes: Axes) -> jax.Array:
    fixed = exact.float32(jax.lax.stop_gradient(x))
    return _one_or_nan(reduction.largest_magnitude(fixed, axes) < np.float32(np.inf))


def _one_or_nan(is_finite: jax.Array) -> jax.Array:
    return jnp.where(is_finite, jnp.float32(1), jnp.float32(np.nan))


@dataclasses.dataclass(frozen=True)
class _OfEnds(TargetDependent):
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
        # Devices would have to tell each other the ends of what is cut.
        shape = (1 if axis in self.axes else n for axis, n in enumerate(x.shape))
        return jnp.ones(tuple(shape), jnp.float32)
