"""Mixins and helpers for printing, comparing and hashing configs."""

import dataclasses
import functools
import hashlib
import typing
from collections.abc import Iterator
from typing import Any, ClassVar, NoReturn

import numpy as np

_WIDTH = 80


class CompactRepr:
    """Gives a frozen dataclass a `repr` that evaluates back to it.

    Fields at their default are omitted, and long representations are split over
    indented lines.

    >>> from aqtlite import config, numerics
    >>> config.Tensor(numerics=numerics.IntSymmetric(bits=8))
    Tensor(numerics=IntSymmetric(bits=8))
    """

    def __repr__(self) -> str:
        return _format(self, indent=0, room=_WIDTH)


class NoFunction:
    """Makes calling a config an error that names the function to call instead."""

    if not typing.TYPE_CHECKING:  # So that type checkers reject calls.

        def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
            raise TypeError(
                f"a config.{type(self).__name__} was called as a function: give Flax "
                "layers AqtDotGeneral(cfg) of aqtlite.flax or aqtlite.flax.nnx, and "
                "what else takes a dot_general aqtlite.make_dot_general(cfg)"
            )

    nowrap: ClassVar[bool] = True
    """Keeps Linen from wrapping a config as a method, if it is an unannotated class
    attribute (`flax.linen.nowrap`)."""


def is_record(value: Any) -> bool:
    """Returns True for a dataclass instance, but not for a dataclass type."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def constructor_arguments(record: Any) -> dict[str, Any]:
    """Constructor arguments that rebuild `record`, one per constructor field.

    A field that the constructor would derive from the other arguments has its default,
    not the derived value.

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
    """`constructor_arguments` that differ from their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(record)}
    return {
        name: value
        for name, value in constructor_arguments(record).items()
        if not _equal(value, defaults[name])
    }


def differences(first: Any, second: Any) -> list[str]:
    """Lists the paths at which two configs differ, one line each.

    >>> from aqtlite import config
    >>> differences(config.weight_only(bits=8), config.weight_only(bits=4))
    ['fwd.rhs.numerics.bits: 8 against 4']

    Args:
        first: config such as a `DotGeneral`.
        second: config to compare with.
    """
    return list(_walk(first, second, ()))


def _walk(first: Any, second: Any, path: tuple[str, ...]) -> Iterator[str]:
    if type(first) is type(second) and is_record(first):
        for field in dataclasses.fields(first):
            values = getattr(first, field.name), getattr(second, field.name)
            yield from _walk(*values, (*path, field.name))
    # NumPy's dtype of float64 equals None.
    elif (first is None) != (second is None) or first != second:
        where = f"{'.'.join(path)}: " if path else ""
        yield f"{where}{first!r} against {second!r}"


@functools.lru_cache(maxsize=1024)
def digest(record: Any) -> str:
    """Short hash of a config, equal in every process.

    Stored in checkpoints. Fields at their default do not contribute, so a field added
    in a later release does not change the hash.
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
    # The repr of a user's object may contain its address.
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return repr(value) if is_plain else type(value).__name__


def _equal(left: Any, right: Any) -> bool:
    # Types must match: True == 1, and NumPy compares dtypes with strings.
    return type(left) is type(right) and left == right


def _builds(cls: type, arguments: dict[str, Any], record: Any) -> bool:
    try:
        return bool(cls(**arguments) == record)
    except (TypeError, ValueError):
        return False


def _format(value: Any, indent: int, room: int) -> str:
    """Formats `value` in `room` columns if possible, else over indented lines."""
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
