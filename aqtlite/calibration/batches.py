"""The batches that calibrations are given."""

from collections.abc import Iterable, Mapping
from typing import Any

_WANTED = (
    "batches must be an iterable of batches, each a tuple of positional arguments or a "
    "single one"
)


def check(batches: Any) -> Iterable[Any]:
    """Returns batches, if they are an iterable of some.

    Args:
        batches: as `calibrate` was given them.

    Raises:
        TypeError: if they are an array, whose rows would be taken for batches, a
            mapping, whose keys would be, or nothing to iterate over.
    """
    if hasattr(batches, "shape") and hasattr(batches, "dtype"):
        raise TypeError(
            f"{_WANTED}; got the array {batches.dtype}{list(batches.shape)}, whose "
            "rows would be taken for batches. Write [x] for a single batch x"
        )
    if isinstance(batches, Mapping):
        raise TypeError(
            f"{_WANTED}; got a {type(batches).__name__} of "
            f"{', '.join(map(str, batches))}. Write [x] for a single batch x"
        )
    # `iter` would start the workers of a data loader.
    if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
        raise TypeError(f"{_WANTED}; got {batches!r}")
    found: Iterable[Any] = batches
    return found


def args_of(batch: Any) -> tuple[Any, ...]:
    """Returns the positional arguments that a batch is.

    A tuple has several. Anything else is one, a named tuple (jraph's `GraphsTuple`)
    too.

    Raises:
        TypeError: if it is a list, which may be meant as either.
    """
    if type(batch) is list:
        raise TypeError(
            f"a batch is a list of {len(batch)} items, which may be positional "
            "arguments or a single one. Write tuple(batch) for the former, as for what "
            "data loaders collate into lists, and (batch,) for the latter"
        )
    return batch if type(batch) is tuple else (batch,)
