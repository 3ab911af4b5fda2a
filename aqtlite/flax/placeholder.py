"""What stands in "params" where a float kernel was before it was frozen."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[],
    meta_fields=["shape", "dtype", "removed"],
)
@dataclasses.dataclass(frozen=True)
class FrozenKernel(nn.meta.AxisMetadata):
    """Holds no numbers: a pytree without leaves.

    Flax layers ask for their kernel before they call `dot_general`, which then does
    not look at it. What they get is NaN: it costs nothing in a compiled program, where
    nobody reads it, and shows where somebody does.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    removed: tuple[tuple[int, int], ...] = ()
    """Index and size of the axes that `nn.scan` or `nn.vmap` took away."""

    def unbox(self) -> jax.Array:
        with jax.debug_nans(False):
            return jnp.full(self.shape, jnp.nan, self.dtype)

    def replace_boxed(self, val: Any) -> Any:
        return val

    def remove_axis(self, index: int, params: Any) -> "FrozenKernel":
        del params
        index = index % len(self.shape)
        return dataclasses.replace(
            self,
            shape=self.shape[:index] + self.shape[index + 1 :],
            removed=(*self.removed, (index, self.shape[index])),
        )

    def add_axis(self, index: int, params: Any) -> "FrozenKernel":
        del params
        (_, size), removed = self.removed[-1], self.removed[:-1]
        index = index % (len(self.shape) + 1)
        shape = (*self.shape[:index], size, *self.shape[index:])
        return dataclasses.replace(self, shape=shape, removed=removed)

    def get_partition_spec(self) -> "FrozenKernel":
        """No leaves here, none in the tree of specs."""
        return self

    def get_sharding(self, mesh: Any) -> "FrozenKernel":
        del mesh
        return self
