"""In-place updates of a slice of an array that the program reads afterwards."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite.lowering.target import OnCpu
from aqtlite.shapes.sharding import vary_together


def update_slice(
    x: jax.Array, update: jax.Array, start_indices: Sequence[Any]
) -> jax.Array:
    """Replaces a slice as `lax.dynamic_update_slice` does.

    XLA:CPU fuses the update with each of its consumers, which then copies the whole
    array: three copies of a cache that is returned and contracted. It does not fuse
    with a loop, which updates in place.

    Args:
        x: the array.
        update: values to write, of the dtype of `x`.
        start_indices: ints, which may be traced.
    """
    return _UpdateSlice()(x, update, *map(jnp.asarray, start_indices))


@dataclasses.dataclass(frozen=True)
class _UpdateSlice(OnCpu):
    """The update of a slice."""

    def reference(self, x, update, *starts):
        return lax.dynamic_update_slice(x, update, starts)

    def on_cpu(self, is_whole, x, update, *starts):
        if not is_whole or not starts:
            return self.reference(x, update, *starts)
        # A loop of one step, but XLA cannot know that.
        x, update, starts = vary_together((x, update, starts))
        smallest = jnp.iinfo(starts[0].dtype).min
        last = jnp.any(jnp.stack(starts) == smallest).astype(jnp.int32)

        def step(carry):
            count, x = carry
            return count + 1, self.reference(x, update, *starts)

        start = jnp.zeros((), jnp.int32), x
        return lax.while_loop(lambda carry: carry[0] <= last, step, start)[1]
