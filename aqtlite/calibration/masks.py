"""The tokens that count, as users give them to `calibrate`."""

import dataclasses
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OfLeaves:
    """The masks of the arrays of a batch."""

    masks: list[jax.Array | None]
    """For each array, which elements count along its leading axes; None if all do."""

    is_known: tuple[bool, ...] = dataclasses.field(metadata={"static": True})
    """For each array, whether the user said which elements count, or that all do."""


def of_leaves(mask: Any, args: Sequence[Any]) -> OfLeaves:
    """Returns the masks of the arrays in the arguments of a call.

    Args:
        mask: bool array, for all arrays whose leading axes have its shape; or a tuple
            with such an array, or None, for each argument. None if all counts.
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
        parts = [_masks(one, x) for one, x in zip(mask, args, strict=True)]
        of_each = [one for part in parts for one in part]
        are_known = [
            one is None or found is not None
            for one, part in zip(mask, parts, strict=True)
            for found in part
        ]
        return OfLeaves(of_each, tuple(are_known))
    found = _masks(mask, args)
    return OfLeaves(found, tuple(mask is None or one is not None for one in found))


def _masks(mask: Any, args: Any) -> list[jax.Array | None]:
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
