"""A quantized array: integer values and their scale."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["qvalue", "scale"],
    meta_fields=["dtype"],
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
    """Stored values: int4, int8 or int16, the shape of the array they stand for."""

    scale: Any
    """float32 of the same rank, of size 1 along the axes that share a scale. The
    array is ``qvalue * scale``."""

    dtype: np.dtype
    """The dtype that `dequant` returns."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.qvalue.shape

    @property
    def ndim(self) -> int:
        return self.qvalue.ndim

    def dequant(self) -> jax.Array:
        """The array that the integers stand for: ``qvalue * scale`` in `dtype`."""
        return (self.qvalue.astype(jnp.float32) * self.scale).astype(self.dtype)

    def __getitem__(self, index: Any) -> "QTensor":
        """Indexes with ints, slices, None and Ellipsis, along any axes.

        Raises:
            TypeError: for arrays and lists of indices; `dequant` first.
            IndexError: for more indices than axes.
        """
        entries = _expand_index(index, self.ndim)
        scale_entries: list[Any] = []
        axis = 0
        for entry in entries:
            if entry is None:
                scale_entries.append(None)
                continue
            if self.scale.shape[axis] == 1:
                entry = slice(None) if isinstance(entry, slice) else 0
            scale_entries.append(entry)
            axis += 1
        return dataclasses.replace(
            self,
            qvalue=self.qvalue[entries],
            scale=self.scale[tuple(scale_entries)],
        )


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
