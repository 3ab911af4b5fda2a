"""Checks of the batches passed to `calibrate`."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax

from aqtlite import errors


class NothingGathers(ValueError):
    """The calibrations of a model need no statistics."""


_WANTED = (
    "batches must be an iterable of batches, each a tuple of positional arguments or a "
    "single one"
)


_OF_BRANCHES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerIntegerConversionError,
)
"""Errors of models that need the value of an array."""


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


def check_not_empty(batch: Any) -> None:
    """Checks that no array of a batch from which nothing came has an axis of size 0.

    Raises:
        ValueError: if one has.
    """
    for x in jax.tree.leaves(batch):
        if 0 in getattr(x, "shape", ()):
            raise ValueError(
                f"there is nothing to see in a batch that holds {errors.brief(x)}, "
                "which has an axis of size 0. Give batches with examples"
            )


def check_gathers(gathered: Any, batch: Any) -> None:
    """Checks that the first batch of a calibration made a model gather statistics.

    Raises:
        ValueError: if there are none, because arrays of the batch have an axis of size
            0.
        NothingGathers: if there are none, for any batch.
    """
    sizes = [x.size for x in jax.tree.leaves(batch) if getattr(x, "shape", ())]
    if not gathered or not any(sizes):
        check_not_empty(batch)
    if gathered:
        return
    raise NothingGathers(
        "no calibration of the model gathers statistics: convert it without, or "
        "give the config one that does, such as calibration.MeanOverBatches(), "
        "in fwd.lhs.calibration"
    )


@contextlib.contextmanager
def called_with(batch: Any) -> Iterator[None]:
    """Explains errors of a call with a batch that does not fit the model.

    A mapping is a single argument, which some models take. A Python value is an array
    to a compiled call, on which a model cannot branch.

    Args:
        batch: the batch of the call inside the context.

    Raises:
        TypeError: if the call raises, and the batch is a mapping; or if the call
            branches on a traced value, and the batch holds Python values.
    """
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        if not isinstance(batch, Mapping):
            _check_values(batch, error)
            raise
        names = [str(name) for name in batch]
        raise TypeError(
            "a batch is an array or a tuple of positional arguments, and the model was "
            f"given a {type(batch).__name__} of {', '.join(names)} as one argument. It "
            f"raised {type(error).__name__}: {error}. If the keys are names of "
            f"arguments, write ({''.join(f'batch[{name!r}], ' for name in names)})"
        ) from error


def _check_values(batch: Any, error: Exception) -> None:
    """Raises TypeError if an error may be due to a Python value in a batch."""
    values = [x for x in jax.tree.leaves(batch) if isinstance(x, bool | int)]
    if values and isinstance(error, _OF_BRANCHES):
        raise TypeError(
            f"a batch holds {', '.join(map(repr, values))}, which the compiled call "
            "takes as an array, and the model needs the value of an array, as to "
            "branch on it. Give what is no array as a keyword argument, such as "
            "calibrate_in_float(model, variables, [x], train=True)"
        ) from error
