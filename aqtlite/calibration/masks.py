"""The tokens that count, as users give them to `calibrate`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from aqtlite import errors

Masks = Callable[[Any], Any] | Iterable[Any] | None
"""Function from a batch to its mask, or a mask for each batch; None if all count."""

_WANTED = (
    "mask must be a function from a batch to its mask, such as lambda batch: batch[1], "
    "or an iterable with a mask for each batch"
)


def with_batches(batches: Iterable[Any], masks: Masks) -> Iterator[tuple[Any, Any]]:
    """Yields each batch with its mask.

    Args:
        batches: batches, checked.
        masks: argument of `calibrate`.

    Raises:
        TypeError: if `masks` is an array, whose rows would be taken for masks, or is
            neither callable nor iterable.
        ValueError: if there are more batches than masks, or fewer.
    """
    if masks is None or callable(masks):
        for batch in batches:
            yield batch, None if masks is None else masks(batch)
        return
    if hasattr(masks, "dtype") or not isinstance(masks, Iterable):
        raise TypeError(
            f"{_WANTED}; got {errors.brief(masks)}. Write [mask] for a single batch"
        )
    each, nothing = iter(masks), object()
    for batch in batches:
        mask = next(each, nothing)
        if mask is nothing:
            raise ValueError("mask= has fewer masks than there are batches")
        yield batch, mask
    if next(each, nothing) is not nothing:
        raise ValueError("mask= has more masks than there are batches")


def of_leaves(mask: Any, args: Sequence[Any]) -> list[jax.Array | None]:
    """Returns the mask of each array in the arguments of a call, None if all counts.

    Args:
        mask: bool array, for all arrays whose leading axes have its shape; or a tuple
            with such an array, or None, for each argument.
        args: positional arguments.

    Raises:
        TypeError: if a mask is not an array of bool.
        ValueError: if a tuple has another length than the arguments, or if a mask is a
            scalar or has the leading axes of no array.
    """
    if type(mask) is tuple:
        if len(mask) != len(args):
            raise ValueError(
                f"mask= gives a tuple of {len(mask)} for a batch of {len(args)} "
                "arguments: give one mask, or None, for each argument, or a single "
                "array for all"
            )
        of_each = zip(mask, args, strict=True)
        return [one for m, x in of_each for one in _of_leaves(m, x)]
    return _of_leaves(mask, args)


def _of_leaves(mask: Any, args: Any) -> list[jax.Array | None]:
    leaves = jax.tree.leaves(args)
    if mask is None:
        return [None] * len(leaves)
    if not hasattr(mask, "dtype") or mask.dtype != bool:
        raise TypeError(
            f"mask= must give an array of bool, True for tokens that count; got "
            f"{errors.brief(mask)}. Write mask != 0 for one of numbers"
        )
    mask = jnp.asarray(mask)
    of_leaves = [
        mask if jnp.shape(x)[: mask.ndim] == mask.shape else None for x in leaves
    ]
    if not mask.ndim or all(one is None for one in of_leaves):
        shapes = ", ".join(str(jnp.shape(x)) for x in leaves)
        raise ValueError(
            f"mask= gives an array of shape {mask.shape}, which are the leading axes "
            f"of no array of the batch, of shapes {shapes or 'none'}: give an element "
            "for each token, such as (batch, length)"
        )
    return of_leaves
