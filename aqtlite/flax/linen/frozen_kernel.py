"""The node in "params" that replaces a frozen kernel."""

import dataclasses
import functools
from typing import Any

import jax
from flax import linen as nn

from aqtlite.program.serving.placeholder import Placeholder, none_if_false
from aqtlite.shapes.sharding import describe


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[],
    meta_fields=["shape", "dtype", "number", "sliced", "spec", "removed"],
)
@dataclasses.dataclass(frozen=True, repr=False)
class FrozenKernel(Placeholder, nn.meta.AxisMetadata):
    """A frozen parameter: a pytree without leaves.

    To Flax it is a box that unboxes to an array of NaN except for a few numbers
    (`aqtlite.program.serving.placeholder`), by which serving finds the frozen weight.
    """

    removed: tuple[tuple[int, int, bool], ...] = ()
    """Axes that `nn.scan` or `nn.vmap` removed: index, size, and whether weights are
    slices along the axis."""

    def __repr__(self) -> str:
        return f"FrozenKernel({describe(self)})"

    def unbox(self) -> jax.Array:
        return self.values()

    def replace_boxed(self, val: Any) -> Any:
        return val

    def remove_axis(self, index: int, params: Any) -> "FrozenKernel":
        del params
        index = index % len(self.shape)
        sliced = self._sliced()
        return dataclasses.replace(
            self,
            shape=self.shape[:index] + self.shape[index + 1 :],
            sliced=none_if_false(sliced[:index] + sliced[index + 1 :]),
            removed=(*self.removed, (index, self.shape[index], sliced[index])),
        )

    def add_axis(self, index: int, params: Any) -> "FrozenKernel":
        del params
        (_, size, is_sliced), removed = self.removed[-1], self.removed[:-1]
        index = index % (len(self.shape) + 1)
        sliced = self._sliced()
        return dataclasses.replace(
            self,
            shape=(*self.shape[:index], size, *self.shape[index:]),
            sliced=none_if_false((*sliced[:index], is_sliced, *sliced[index:])),
            removed=removed,
        )

    def _sliced(self) -> tuple[bool, ...]:
        return self.sliced or (False,) * len(self.shape)

    def to_nnx_metadata(self) -> dict[str, Any]:
        """Refuses to become an `nnx.Variable`.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"a parameter of shape {self.shape} is frozen, and serving variables have "
            "no counterpart in NNX: serve them with the Linen model that was "
            "converted, or bridge the float variables"
        )

    def get_partition_spec(self) -> "FrozenKernel":
        """Returns itself, as there is no leaf to partition."""
        return self

    def get_sharding(self, mesh: Any) -> "FrozenKernel":
        """Returns itself, as `get_partition_spec` does."""
        del mesh
        return self
