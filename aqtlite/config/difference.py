"""The differences between two configs."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from aqtlite.config import representation


def differences(first: Any, second: Any) -> list[str]:
    """Lists the paths at which two configs differ, a line for each.

    >>> from aqtlite import config
    >>> differences(config.weight_only(bits=8), config.weight_only(bits=4))
    ['fwd.rhs.numerics.bits: 8 against 4']

    Args:
        first: a config such as `DotGeneral`.
        second: another.
    """
    return list(_walk(first, second, ()))


def _walk(first: Any, second: Any, path: tuple[str, ...]) -> Iterator[str]:
    if type(first) is type(second) and representation.is_record(first):
        for field in dataclasses.fields(first):
            values = getattr(first, field.name), getattr(second, field.name)
            yield from _walk(*values, (*path, field.name))
    elif first != second:
        where = f"{'.'.join(path)}: " if path else ""
        yield f"{where}{first!r} against {second!r}"
