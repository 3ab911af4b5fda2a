"""A quantized array: integer values and their scale."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["qvalue", "scale"],
    meta_fields=["dtype", "order"],
)
@dataclasses.dataclass(frozen=True)
class QTensor:
    """Integer values and the scale that turns them back into an array.

    A pytree with the two leaves `qvalue` and `scale`: it goes through `jax.jit`,
    `jax.lax.scan`, `jax.device_put`, `jax.tree.map` and checkpoints.

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
    """Stored values: int4, int8 or int16."""

    scale: Any
    """float32 of the same rank, of size 1 along the axes that share a scale. The
    array is ``qvalue * scale``."""

    dtype: np.dtype
    """The dtype that `dequant` returns."""

    order: tuple[int, ...] | None = None
    """Which axis of the array each (trailing) axis of `qvalue` and `scale` is. None:
    its own. Frozen weights are stored with their contracting axes last."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array, whatever the order in which it is stored."""
        return tuple(self.qvalue.shape[axis] for axis in self._stored_axes())

    @property
    def ndim(self) -> int:
        """The rank of the array."""
        return self.qvalue.ndim

    def _stored_axes(self) -> tuple[int, ...]:
        """For each axis of the array, the axis of `qvalue` that it is."""
        if self.order is None:
            return tuple(range(self.ndim))
        # Axes in front of those named were stacked by a scan or a vmap.
        stacked = self.ndim - len(self.order)
        inverse = (stacked + int(axis) for axis in np.argsort(self.order))
        return (*range(stacked), *inverse)

    def stored_in(self, order: tuple[int, ...]) -> "QTensor":
        """The same array, its axes stored in another order.

        Args:
            order: a permutation of the axes.
        """
        plain = self.in_own_order()
        return QTensor(
            plain.qvalue.transpose(order),
            plain.scale.transpose(order),
            self.dtype,
            None if order == tuple(range(self.ndim)) else order,
        )

    def in_own_order(self) -> "QTensor":
        """The same array, its axes stored in their own order."""
        if self.order is None:
            return self
        axes = self._stored_axes()
        return QTensor(
            self.qvalue.transpose(axes), self.scale.transpose(axes), self.dtype
        )

    def dequant(self) -> jax.Array:
        """The array that the integers stand for: ``qvalue * scale`` in `dtype`."""
        plain = self.in_own_order()
        return (plain.qvalue.astype(jnp.float32) * plain.scale).astype(self.dtype)

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("a QTensor without axes has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator["QTensor"]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> "QTensor":
        """Indexes with ints, slices, None and Ellipsis, along any axes.

        Raises:
            TypeError: for arrays and lists of indices; `dequant` first.
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
            size = self.shape[axis]
            if isinstance(entry, int) and not -size <= entry < size:
                raise IndexError(
                    f"index {entry} is out of range for axis {axis} of size {size}"
                )
            if self.scale.shape[axis] == 1:
                entry = slice(None) if isinstance(entry, slice) else 0
            scale_entries.append(entry)
            axis += 1
        return dataclasses.replace(
            self,
            qvalue=self.qvalue[entries],
            scale=self.scale[tuple(scale_entries)],
        )


def axes_in_storage(q: Any, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Where axes of an operand, an array or a `QTensor`, lie as it is stored."""
    if not isinstance(q, QTensor) or q.order is None:
        return axes
    return tuple(q.order.index(axis) for axis in axes)


def _expand_index(index: Any, ndim: int) -> tuple[Any, ...]:
    """One entry per axis of the array, and None wherever a new axis goes."""
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
