"""Checks of the fields of grids, calibrations and configs.

A check takes a value and the name of its place, and returns the normalized value; a
scalar of NumPy becomes one of Python. It raises TypeError for a value of the wrong
type, and ValueError for one out of range.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).tiny)

Check = Callable[[Any, str], Any]


def check(record: Any, **checks: Check) -> None:
    """Checks fields of a frozen dataclass, and stores the normalized values.

    Args:
        record: dataclass instance.
        **checks: check for each field, by name.
    """
    for name, checked in checks.items():
        where = f"{type(record).__name__}.{name}"
        object.__setattr__(record, name, checked(getattr(record, name), where))


def flag(value: Any, where: str) -> bool:
    """Checks for a bool."""
    value = _of_python(value)
    if not isinstance(value, bool):
        raise TypeError(f"{where} must be a bool, got {value!r}")
    return value


def instance(cls: Any, what: str) -> Check:
    """A check for an instance of a class, described by `what` in the message."""

    def checked(value: Any, where: str) -> Any:
        if not isinstance(value, cls):
            raise TypeError(f"{where} must be {what}, got {value!r}")
        return value

    return checked


def integer(smallest: int, largest: int | None = None, hint: str = "") -> Check:
    """A check for an int within limits, not a bool; the message ends with the hint."""

    def checked(value: Any, where: str) -> int:
        value = _of_python(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{where} must be an int, got {value!r}")
        if value < smallest or (largest is not None and value > largest):
            limits = f"{smallest} or more"
            if largest is not None:
                is_one = smallest == largest
                limits = f"{smallest}" if is_one else f"from {smallest} to {largest}"
            raise ValueError(f"{where} must be {limits}, got {value}{hint}")
        return value

    return checked


def or_none(checked: Check) -> Check:
    """A check that also accepts None."""
    return lambda value, where: None if value is None else checked(value, where)


def number(value: Any, where: str) -> float:
    """Checks for a number that is finite, and zero or normal, in float32.

    Subnormals are rejected because devices treat them as 0.
    """
    value = _of_python(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{where} must be a number, got {value!r}")
    if not abs(value) <= _LARGEST:
        raise ValueError(f"{where} must be finite in float32, got {value}")
    if 0 < abs(value) < _SMALLEST:
        raise ValueError(
            f"{where} must be a normal float32, at least 2^-126 in magnitude, because "
            f"devices take smaller ones for 0, got {value}"
        )
    return float(value)


def not_negative(value: Any, where: str) -> float:
    """Checks for a `number`, 0 or above."""
    value = number(value, where)
    if value < 0:
        raise ValueError(f"{where} must not be negative, got {value}")
    return float(value)


def positive(value: Any, where: str) -> float:
    """Checks for a `number` above 0."""
    checked = number(value, where)
    if not checked > 0:
        raise ValueError(f"{where} must be positive, got {value}")
    return checked


def fraction(value: Any, where: str) -> float:
    """Checks for a `number` from 0 to below 1 in float32."""
    checked = number(value, where)
    if not 0 <= np.float32(checked) < 1:
        raise ValueError(
            f"{where} must be from 0 to below 1, in float32 as well, got {value}"
        )
    return checked


def percentage(value: Any, where: str) -> float:
    """Checks for a number above 1, at most 100; a smaller one is a fraction."""
    checked = positive(value, where)
    if checked > 100:
        raise ValueError(f"{where} must be at most 100, got {value}")
    if checked <= 1:
        raise ValueError(
            f"{where} must be above 1, got {value}: it is a percentage, such as 99.9, "
            "and not a fraction"
        )
    return checked


def _of_python(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
