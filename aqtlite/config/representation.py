"""A compact `repr` of configs: what is not a default, on lines that fit a screen."""

import dataclasses
import functools
import hashlib
from typing import Any

import numpy as np

_WIDTH = 80


class CompactRepr:
    """Gives a frozen dataclass a `repr` that evaluates back to it.

    Fields that hold their default are left out, and what does not fit on a line is
    broken and indented.

    >>> from aqtlite import config, numerics
    >>> config.Tensor(numerics=numerics.IntSymmetric(bits=8))
    Tensor(numerics=IntSymmetric(bits=8))
    """

    def __repr__(self) -> str:
        return _format(self, indent=0, room=_WIDTH)


def is_record(value: Any) -> bool:
    """Returns True for a dataclass instance (and not for a dataclass itself)."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def constructor_arguments(record: Any) -> dict[str, Any]:
    """The arguments that build `record` again, every field of the constructor.

    A field whose value the constructor would derive from the other arguments holds
    its default, not the derived value.

    >>> from aqtlite import numerics
    >>> grid = numerics.IntSymmetric(bits=8)
    >>> grid.preserve_zero, constructor_arguments(grid)["preserve_zero"]
    (True, None)
    """
    fields = [field for field in dataclasses.fields(record) if field.init]
    arguments = {field.name: getattr(record, field.name) for field in fields}
    for field in fields:
        if field.default is dataclasses.MISSING:
            continue
        if _equal(arguments[field.name], field.default):
            continue
        with_default = {**arguments, field.name: field.default}
        if _builds(type(record), with_default, record):
            arguments = with_default
    return arguments


def non_default_arguments(record: Any) -> dict[str, Any]:
    """The arguments of `constructor_arguments` that differ from their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(record)}
    return {
        name: value
        for name, value in constructor_arguments(record).items()
        if not _equal(value, defaults[name])
    }


@functools.lru_cache(maxsize=1024)
def digest(record: Any) -> str:
    """A short text that tells configs apart, the same in every process.

    Checkpoints hold it. Fields that hold their default are not in it, so that a field
    that a later release adds leaves it as it is.
    """
    return hashlib.sha256(_canonical(record).encode()).hexdigest()[:12]


def _canonical(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({','.join(map(_canonical, value))})"
    if is_record(value):
        fields = sorted(non_default_arguments(value).items())
        texts = (f"{name}={_canonical(one)}" for name, one in fields)
        return f"{type(value).__name__}({','.join(texts)})"
    if isinstance(value, np.dtype):
        return value.name
    # The text of an object of one's own may hold its address.
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return repr(value) if is_plain else type(value).__name__


def _equal(left: Any, right: Any) -> bool:
    # The type matters: True == 1, and numpy compares dtypes with strings.
    return type(left) is type(right) and left == right


def _builds(cls: type, arguments: dict[str, Any], record: Any) -> bool:
    try:
        return bool(cls(**arguments) == record)
    except (TypeError, ValueError):
        return False


def _format(value: Any, indent: int, room: int) -> str:
    """Formats `value` in `room` columns if it can, else over indented lines."""
    if isinstance(value, np.dtype):
        return repr(value.name)
    if not is_record(value):
        return repr(value)
    name = type(value).__name__
    arguments = non_default_arguments(value)
    flat = [f"{key}={_format(item, 0, 10**6)}" for key, item in arguments.items()]
    line = f"{name}({', '.join(flat)})"
    if len(line) <= room:
        return line
    inner = indent + 4
    lines = [
        " " * inner + f"{key}={_format(item, inner, _WIDTH - inner - len(key) - 2)},\n"
        for key, item in arguments.items()
    ]
    return f"{name}(\n{''.join(lines)}{' ' * indent})"
