"""Sums of elements that are scattered to one place, in their order."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite.lowering.target import TargetDependent


@dataclasses.dataclass(frozen=True)
class ScatterAdd(TargetDependent):
    """`jax.lax.scatter_add` of float32, as in the gradient of a lookup.

    CPUs add updates one by one, in their order. XLA would let each device add the
    updates that it holds, and then add the results.
    """

    dimension_numbers: lax.ScatterDimensionNumbers
    indices_are_sorted: bool
    unique_indices: bool
    mode: lax.GatherScatterMode

    def reference(self, x, indices, updates):
        return lax.scatter_add(x, indices, updates, **dataclasses.asdict(self))

    def lowered(self, target, x, indices, updates):
        if target.partitions > 1 and indices.size:
            of_indices, of_updates = self._added_axes(indices.ndim, updates.ndim)
            zero = _unknown_zero(indices)
            indices = _gathered(indices, of_indices, zero)
            updates = _gathered(updates, of_updates, zero)
        return self.reference(x, indices, updates)

    def _added_axes(self, ndim: int, updates_ndim: int) -> tuple[list[int], list[int]]:
        """Axes of the indices, and of the updates, along which updates may meet."""
        numbers = self.dimension_numbers
        window = numbers.update_window_dims
        scattered = [axis for axis in range(updates_ndim) if axis not in window]
        batching = numbers.scatter_indices_batching_dims
        of_indices = [axis for axis in range(ndim - 1) if axis not in batching]
        return of_indices, [scattered[axis] for axis in of_indices]


def _unknown_zero(indices: jax.Array) -> jax.Array:
    """Zero, which XLA does not know: no integer has so many bits."""
    bits = lax.population_count(indices)
    most = jnp.max(bits.astype(jnp.int32))
    return (most > 8 * indices.dtype.itemsize).astype(jnp.int32)


def _gathered(x: jax.Array, axes: list[int], zero: jax.Array) -> jax.Array:
    """Returns an array that XLA does not divide along some axes.

    It divides no axis along which a part is taken from a place that it does not know.
    """
    sizes = x.shape
    x = lax.pad(
        x, jnp.zeros((), x.dtype), [(0, axis in axes, 0) for axis in range(x.ndim)]
    )
    return lax.dynamic_slice(x, [zero] * x.ndim, sizes)
