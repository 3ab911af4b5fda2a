"""A quantized array: stored values, their scale, and the grid that decodes them."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.numerics import Numerics


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["qvalue", "scale", "zero_point"],
    meta_fields=["dtype", "order", "numerics"],
)
@dataclasses.dataclass(frozen=True)
class QTensor:
    """Stored values, and what turns them back into an array.

    A pytree with the leaves `qvalue`, `scale` and, on a grid that has one,
    `zero_point`: it goes through `jax.jit`, `jax.lax.scan`, `jax.device_put`,
    `jax.tree.map` and checkpoints.

    >>> import aqtlite, jax.numpy as jnp
    >>> from aqtlite import config, numerics
    >>> int8 = config.Tensor(numerics=numerics.IntSymmetric(bits=8))
    >>> q = aqtlite.quantize(jnp.array([[1.0, -2.0], [0.5, 0.25]]), int8, (1,))
    >>> q.qvalue.tolist(), q.scale.shape, q.dtype
    ([[64, -127], [127, 64]], (2, 1), dtype('float32'))
    >>> q[1].dequant().round(2).tolist()
    [0.5, 0.25]
    """

    qvalue: Any
    """Stored values, in the storage dtype of the grid."""

    scale: Any
    """float32 of the same rank. Along each axis its size divides that of `qvalue`: so
    many blocks share a scale each, all of the axis where it is 1."""

    dtype: np.dtype
    """The dtype that `dequant` returns."""

    order: tuple[int, ...] | None = None
    """The axis of the array that each (trailing) axis of `qvalue` and `scale` is. None:
    its own. Frozen weights are stored with their contracting axes last."""

    zero_point: Any = None
    """int32 of the shape of `scale`: the stored value that stands for zero. None: 0."""

    numerics: Numerics | None = None
    """The grid. None: integers, one unit each."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array, whatever the order in which it is stored."""
        return tuple(self.qvalue.shape[axis] for axis in self._stored_axes())

    @property
    def ndim(self) -> int:
        """The rank of the array."""
        return self.qvalue.ndim

    def _stored_axes(self) -> tuple[int, ...]:
        """Maps each axis of the array to that of `qvalue`."""
        if self.order is None:
            return tuple(range(self.ndim))
        # Axes in front of those named were stacked by a scan or a vmap.
        stacked = self.ndim - len(self.order)
        inverse = (stacked + int(axis) for axis in np.argsort(self.order))
        return (*range(stacked), *inverse)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Along each axis of the array, how many elements share a scale."""
        plain = self.in_own_order()
        return tuple(
            size if count == 1 else size // count
            for size, count in zip(plain.qvalue.shape, plain.scale.shape, strict=True)
        )

    def stored_in(self, order: tuple[int, ...]) -> "QTensor":
        """Stores the axes in another order.

        Args:
            order: a permutation of the axes.
        """
        is_own = order == tuple(range(self.ndim))
        return self.in_own_order()._transposed(order, None if is_own else order)

    def in_own_order(self) -> "QTensor":
        """Stores the axes in their own order."""
        if self.order is None:
            return self
        return self._transposed(self._stored_axes(), None)

    def _transposed(
        self, axes: tuple[int, ...], order: tuple[int, ...] | None
    ) -> "QTensor":
        arrays = (self.qvalue, self.scale, self.zero_point)
        qvalue, scale, zero_point = (
            None if array is None else array.transpose(axes) for array in arrays
        )
        return dataclasses.replace(
            self, qvalue=qvalue, scale=scale, zero_point=zero_point, order=order
        )

    def dequant(self) -> jax.Array:
        """The array that the stored values stand for, in `dtype`.

        ``scale * decode(qvalue - zero_point)``, in float32.
        """
        plain = self.in_own_order()
        stored = plain.qvalue
        if plain.zero_point is not None:
            zero_point = _repeat_blocks(plain.zero_point, stored.shape)
            stored = stored.astype(jnp.int32) - zero_point
        grid = plain.numerics
        if grid is not None and grid.arithmetic == "table":
            values = grid.decode(stored)
            if values.dtype != jnp.float32 or values.shape != stored.shape:
                raise TypeError(
                    f"{type(grid).__name__}.decode must return float32 of shape "
                    f"{stored.shape}, got {values.dtype} of shape {values.shape}"
                )
        else:
            values = stored.astype(jnp.float32)
        scale = _repeat_blocks(plain.scale, stored.shape)
        return (values * scale).astype(self.dtype)

    def __repr__(self) -> str:
        """Types instead of numbers: serving variables hold thousands of them."""
        parts = [_describe(self.qvalue), f"scale={_describe(self.scale)}"]
        if self.zero_point is not None:
            parts.append(f"zero_point={_describe(self.zero_point)}")
        if self.numerics is not None:
            parts.append(f"numerics={self.numerics!r}")
        if self.order is not None:
            parts.append(f"order={self.order}")
        return f"QTensor({', '.join(parts)}, dtype={np.dtype(self.dtype).name!r})"

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("a QTensor without axes has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator["QTensor"]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> "QTensor":
        """Indexes with ints, slices, None and Ellipsis.

        Raises:
            TypeError: for arrays and lists of indices, and along an axis of several
                blocks; `dequant` first.
            IndexError: for more indices than axes, or a Python int out of range.
        """
        if self.order is not None:
            return self.in_own_order()[index]
        entries = _expand_index(index, self.ndim)
        scale_entries: list[Any] = []
        axis = 0
        for entry in entries:
            if entry is None:
                scale_entries.append(None)
                continue
            size, count = self.shape[axis], self.scale.shape[axis]
            if isinstance(entry, int) and not -size <= entry < size:
                raise IndexError(
                    f"index {entry} is out of range for axis {axis} of size {size}"
                )
            is_whole = isinstance(entry, slice) and entry == slice(None)
            if count == 1:
                entry = slice(None) if isinstance(entry, slice) else 0
            elif count != size and not is_whole:
                raise TypeError(
                    f"axis {axis} of a QTensor of shape {self.shape} has {count} "
                    f"blocks of {size // count} elements with a scale each, and cannot "
                    "be indexed; index the result of .dequant() instead"
                )
            scale_entries.append(entry)
            axis += 1
        at = tuple(scale_entries)
        zero_point = None if self.zero_point is None else self.zero_point[at]
        return dataclasses.replace(
            self,
            qvalue=self.qvalue[entries],
            scale=self.scale[at],
            zero_point=zero_point,
        )


def _describe(leaf: Any) -> str:
    """The dtype and shape of a leaf, whatever a transformation has put there."""
    if not (hasattr(leaf, "dtype") and hasattr(leaf, "shape")):
        return repr(leaf)
    return f"{leaf.dtype.name}[{','.join(map(str, leaf.shape))}]"


def _repeat_blocks(x: Any, shape: tuple[int, ...]) -> Any:
    """Repeats an array with one element for each block until it broadcasts."""
    for axis, size in enumerate(shape):
        if x.shape[axis] not in (1, size):
            x = jnp.repeat(x, size // x.shape[axis], axis)
    return x


Operand = jax.Array | QTensor
"""One side of a contraction."""


def axes_in_storage(q: Any, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Maps axes of an operand, an array or a `QTensor`, to those of its storage."""
    if not isinstance(q, QTensor) or q.order is None:
        return axes
    return tuple(q.order.index(axis) for axis in axes)


def _expand_index(index: Any, ndim: int) -> tuple[Any, ...]:
    """Expands an index to one entry per axis, and None wherever a new axis goes."""
    entries = index if isinstance(index, tuple) else (index,)
    for entry in entries:
        is_int = (
            hasattr(entry, "dtype")
            and entry.ndim == 0
            and jnp.issubdtype(entry.dtype, jnp.integer)
        ) or (isinstance(entry, int) and not isinstance(entry, bool))
        if not (is_int or entry is None or entry is Ellipsis) and not isinstance(
            entry, slice
        ):
            raise TypeError(
                "a QTensor takes ints, slices, None and Ellipsis as indices; got "
                f"{entry!r}. Index the result of .dequant() instead"
            )
    named = sum(entry is not None and entry is not Ellipsis for entry in entries)
    if named > ndim or sum(entry is Ellipsis for entry in entries) > 1:
        raise IndexError(f"index {index!r} does not fit an array of {ndim} axes")
    rest = (slice(None),) * (ndim - named)
    if not any(entry is Ellipsis for entry in entries):
        return entries + rest
    at = next(i for i, entry in enumerate(entries) if entry is Ellipsis)
    return entries[:at] + rest + entries[at + 1 :]
