"""The node in "params" that replaces a frozen kernel."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec

from aqtlite.flax.linen.bare import placeholder_values
from aqtlite.program.serving import guards
from aqtlite.program.serving.model import Parameter
from aqtlite.program.serving.placeholder import Placeholder, none_if_false
from aqtlite.shapes.sharding import describe


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["marker"],
    meta_fields=["shape", "dtype", "number", "sliced", "spec", "path", "removed"],
)
@dataclasses.dataclass(frozen=True, repr=False)
class FrozenKernel(Placeholder, nn.meta.AxisMetadata):
    """A frozen parameter.

    To Flax it is a box that unboxes to an array of NaN except for a few numbers
    (`aqtlite.flax.linen.bare.placeholder_values`), by which a bare call finds the
    frozen weight. Its only leaf is `marker`, zeros, with respect to which no gradient
    exists: asking for it raises.
    """

    removed: tuple[tuple[int, int, bool], ...] = ()
    """Axes that `nn.scan` or `nn.vmap` removed: index, size, and whether weights are
    slices along the axis."""

    def __repr__(self) -> str:
        return f"FrozenKernel({describe(self)})"

    def why_unreadable(self) -> str:
        return (
            f"parameter {self.path!r} is frozen for the contractions of its own layer, "
            "and something else reads it from the variables: contract it by a method "
            "of that layer; or quantize the float model by rules, and convert each "
            f"call with {guards.LINEN}"
        )

    def unbox(self) -> jax.Array:
        with jax.debug_nans(False):
            return guards.untrained(
                self.path, placeholder_values.values_of(self), self.marker
            )

    def replace_boxed(self, val: Any) -> Any:
        return val

    def remove_axis(self, index: int, params: Any) -> "FrozenKernel":
        del params
        index = index % len(self.shape)
        if (noted := _noted.value) is not None:
            noted.add(self.number, self._axis(index))
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

    def _axis(self, index: int) -> int:
        """Returns the axis of the whole parameter that is an axis of what is left."""
        for removed, _, _ in reversed(self.removed):
            index += removed <= index
        return index

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
        """Returns itself with a spec for its marker, which is not partitioned."""
        return self._with_leaf(PartitionSpec())

    def get_sharding(self, mesh: Any) -> "FrozenKernel":
        """Returns itself with a sharding for its marker, which is not partitioned."""
        return self._with_leaf(NamedSharding(mesh, PartitionSpec()))

    def _with_leaf(self, leaf: Any) -> "FrozenKernel":
        return jax.tree.map(lambda _: leaf, self)


class _Noted:
    """Axes of parameters, by number; hashed by identity, as contexts of JAX are."""

    def __init__(self, axes: Mapping[int, set[int]]):
        self._axes = axes

    def add(self, number: int, axis: int) -> None:
        self._axes[number].add(axis)


_noted = jax.make_user_context(None)


@contextlib.contextmanager
def noted_axes(axes: Mapping[int, set[int]]) -> Iterator[None]:
    """Adds the axes that transformations slice inside the context.

    Args:
        axes: axes of each frozen parameter, by its number.
    """
    with _noted(_Noted(axes)):
        yield


def in_place_of(params: Any, frozen: Mapping[Parameter, Placeholder]) -> Any:
    """Returns the parameters with a `FrozenKernel` in place of each frozen one.

    Args:
        params: the parameters, boxed or not; a box is replaced with its contents.
        frozen: placeholders of the frozen parameters.
    """
    kernels = {
        parameter.key_path: dataclasses.replace(one, path=str(parameter))
        for parameter, one in frozen.items()
    }

    def replace(path: tuple[Any, ...], node: Any) -> Any:
        for below, _ in jax.tree.leaves_with_path(node):
            one = kernels.get((*path, *below))
            if one is not None:
                return FrozenKernel(
                    one.shape,
                    one.dtype,
                    one.number,
                    one.sliced,
                    one.spec,
                    one.path,
                    one.marker,
                )
        return node

    return jax.tree.map_with_path(replace, params, is_leaf=nn.meta.is_axis_metadata)
