"""Numbers of the config of a decoder, within what memory can hold."""

import math

from aqtlite.checkpoint import CheckpointError
from aqtlite.checkpoint.quantized_formats.settings import Settings

LARGEST = 2**31 - 1
"""The largest int32, and size of an axis."""

_LARGEST_HEAD = 1 << 16
"""The most channels of a head: each pair has a frequency in the config."""

_MOST_LAYERS = 1 << 12
"""The most layers: configs keep some fields for each."""


def size_of(settings: Settings, key: str, default: int | None = None) -> int:
    """A size of an array, at most the largest int32."""
    return settings.integer(key, 1, default, LARGEST)


def count_of_layers(settings: Settings, key: str) -> int:
    """The number of layers, of which configs keep some fields each."""
    return settings.integer(key, 1, most=_MOST_LAYERS)


def size_of_heads(settings: Settings, key: str, default: int) -> int:
    """The channels of a head, each with a frequency.

    Raises:
        CheckpointError: if a head has too many, given or computed.
    """
    default = max(default, 1)
    found = settings.integer(key, 1, default, _LARGEST_HEAD)
    if found > _LARGEST_HEAD:
        raise CheckpointError(
            f"{settings.where}: heads are {default} channels wide, more than "
            f"{_LARGEST_HEAD}; give {key}"
        )
    return found


def number(settings: Settings, key: str, default: float | None) -> float:
    """A positive number; `default` where the key is missing or null.

    Raises:
        CheckpointError: if it is something else, or is missing and has no default.
    """
    value = settings.values.get(key)
    if value is None and default is not None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and is_number and 0 < value < math.inf:
        return float(value)
    raise settings.wrong(key, "a positive number")
