"""Checks of the batches passed to `calibrate`."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from aqtlite import errors

_WANTED = (
    "batches must be an iterable of batches, each a tuple of positional arguments or a "
    "single one"
)


def check(batches: Any) -> Iterable[Any]:
    """Returns `batches` if they are an iterable of batches.

    Args:
        batches: argument of `calibrate`.

    Raises:
        TypeError: if `batches` is an array or a mapping, where the rows or keys would
            be taken for batches, or is not iterable.
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
    # Not `iter(batches)`, which would start the workers of a data loader.
    if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
        raise TypeError(f"{_WANTED}; got {errors.brief(batches)}")
    found: Iterable[Any] = batches
    return found


def args_of(batch: Any) -> tuple[Any, ...]:
    """Returns the positional arguments in a batch.

    A tuple holds several arguments. Anything else is one argument, including a named
    tuple (such as jraph's `GraphsTuple`).

    Raises:
        TypeError: if the batch is a list, which is ambiguous.
    """
    if type(batch) is list:
        raise TypeError(
            f"a batch is a list of {len(batch)} items, which may be positional "
            "arguments or a single one. Write tuple(batch) for the former, as for what "
            "data loaders collate into lists, and (batch,) for the latter"
        )
    return batch if type(batch) is tuple else (batch,)


@contextlib.contextmanager
def called_with(batch: Any) -> Iterator[None]:
    """Explains errors of a call with a batch whose keys are names of arguments.

    A mapping is a single argument, which some models take.

    Args:
        batch: the batch of the call inside the context.

    Raises:
        TypeError: if the call raises, and the batch is a mapping.
    """
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        if not isinstance(batch, Mapping):
            raise
        names = [str(name) for name in batch]
        raise TypeError(
            "a batch is an array or a tuple of positional arguments, and the model was "
            f"given a {type(batch).__name__} of {', '.join(names)} as one argument. It "
            f"raised {type(error).__name__}: {error}. If the keys are names of "
            f"arguments, write ({''.join(f'batch[{name!r}], ' for name in names)})"
        ) from error
