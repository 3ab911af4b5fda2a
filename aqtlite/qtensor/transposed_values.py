"""Stored values with their axes in another order than the array has."""

import dataclasses
import functools

import jax
import numpy as np

from aqtlite.lowering import transposed
from aqtlite.numerics import Numerics
from aqtlite.qtensor import stored_values
from aqtlite.qtensor.laid_out import LaidOut


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values"],
    meta_fields=["axes", "grid"],
)
@dataclasses.dataclass(frozen=True)
class TransposedValues(LaidOut):
    """Values of a frozen weight as they are stored, beside scales in their own order.

    A kernel reads values whose contracting axes come last. Where there is none, they
    are contracted in their own order, on which sums of floats depend.

    >>> import jax.numpy as jnp
    >>> from aqtlite import numerics
    >>> codes, e2m1 = jnp.array([[-1, 1, 7]], jnp.int4), "float4_e2m1fn"
    >>> one = TransposedValues(codes, (1, 0), numerics.Float.from_dtype(e2m1))
    >>> one.shape, one.unpacked().astype(float).tolist()
    ((3, 1), [[-6.0], [0.5], [6.0]])
    """

    values: jax.Array
    """Values of the grid, or what `stored_values.to_save` returned for them."""

    axes: tuple[int, ...]
    """The axis of `values` for each axis of the array."""

    grid: Numerics

    @property
    def dtype(self) -> np.dtype:  # type: ignore[override]
        return self.grid.storage_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape[axis] for axis in self.axes)

    def unpacked(self) -> jax.Array:
        return transposed(self.on_grid(), self.axes)

    def on_grid(self) -> jax.Array:
        """Returns the values in the dtype of the grid, as they are stored."""
        return stored_values.on_grid(self.values, self.grid)
