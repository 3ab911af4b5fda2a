"""Magnitudes of outputs, which DoRA trains beside its low-rank adapter."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite import config
from aqtlite.operations import DotGeneral

if TYPE_CHECKING:
    from aqtlite.program.planned import PlannedContraction

MAGNITUDE = "magnitude"
"""Name of the parameter: float32, with the axes of `lora_b` but that of the rank."""


def has_one(one: "PlannedContraction") -> bool:
    """Whether the adapter of a contraction has magnitudes."""
    return isinstance(one.adapter, config.Dora)


def norm(
    axes: tuple[tuple[int | None, ...], tuple[int | None, ...]], w: jax.Array
) -> jax.Array:
    """Returns the norm of a weight for each output, in the order of `lora_b`'s axes.

    Args:
        axes: axes of the weight that `lora_a` and `lora_b` have; None: the rank.
        w: the weight, float.
    """
    kept = [axis for axis in axes[1] if axis is not None]
    summed = tuple(axis for axis in range(w.ndim) if axis not in kept)
    wide = w.astype(jnp.float32)
    found = jnp.sqrt(jnp.sum(wide * wide, axis=summed))
    order = np.argsort(np.argsort(kept))
    return found.transpose(tuple(map(int, order)))


def of_weight(
    axes: tuple[tuple[int | None, ...], tuple[int | None, ...]],
    factor: jax.Array,
    ndim: int,
) -> jax.Array:
    """Returns a factor for each output, as it multiplies a weight.

    Args:
        axes: as in `norm`.
        factor: one for each output, in the shape of `norm`'s result.
        ndim: rank of the weight.
    """
    kept = [axis for axis in axes[1] if axis is not None]
    ordered = factor.transpose(tuple(map(int, np.argsort(kept))))
    return jnp.expand_dims(ordered, [i for i in range(ndim) if i not in kept])


def of_results(
    one: "PlannedContraction", factor: jax.Array, x: Any, others: Sequence[Any]
) -> jax.Array:
    """Returns a factor for each output, as it multiplies a contraction's result.

    Args:
        one: the contraction.
        factor: one for each output, in the shape of `norm`'s result.
        x: its input.
        others: its further inputs, such as sizes of groups.
    """
    if one.op == "ragged_dot":
        (sizes,) = others
        rows = jnp.ones((x.shape[0], 1), jnp.float32)
        exact = lax.Precision.HIGHEST
        return lax.ragged_dot(rows, factor[:, None], sizes, precision=exact)
    out = one.site.eqn.outvars[0].aval.shape
    operation, _, _ = one.types()
    if not isinstance(operation, DotGeneral):
        shape = [1] * len(out)
        features = one.site.eqn.params["dimension_numbers"].out_spec[1]
        shape[features] = factor.size
        return factor.reshape(shape)
    (contracting, _), (batch, _) = operation.dims
    rest = [n for i, n in enumerate(x.shape) if i not in (*contracting, *batch)]
    front = len(batch)
    sizes = factor.shape
    spread = factor.reshape(*sizes[:front], *(1 for _ in rest), *sizes[front:])
    spread = jnp.broadcast_to(spread, (*sizes[:front], *rest, *sizes[front:]))
    order = one.order(x.ndim)
    spread = spread if order is None else spread.transpose(order)
    return spread.reshape(out)
