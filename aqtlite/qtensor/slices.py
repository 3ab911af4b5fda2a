"""Slices of an array with blocks, and those of its scales."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from aqtlite.qtensor.qtensor import QTensor


def cuts_blocks(what: str, q: QTensor, axis: int) -> TypeError:
    """The error of a slice that ends inside a block."""
    return TypeError(
        f"{what} along axis {axis} of a QTensor of shape {q.shape}, which has "
        f"{q.scale.shape[axis]} blocks of {q.blocks[axis]} elements with a scale each: "
        f"it would cut through them. Use the result of .dequant() instead"
    )


def check_each_axis(what: str, q: QTensor, *given: Sequence[Any]) -> None:
    """Raises ValueError unless each of the sequences has a number for each axis."""
    if any(len(one) != q.ndim for one in given):
        raise ValueError(
            f"{what} of a QTensor of shape {q.shape} takes {q.ndim} start indices (and "
            f"sizes), one for each axis, and got {' and '.join(map(repr, given))}"
        )


def scale_starts(q: QTensor, start_indices: Sequence[Any]) -> list[Any]:
    """The start indices of a slice in the scale, clamped like those of the slice."""
    found = zip(start_indices, q.shape, q.scale.shape, strict=True)
    return [start if n == size else jnp.zeros_like(start) for start, size, n in found]
