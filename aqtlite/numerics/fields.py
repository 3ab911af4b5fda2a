"""Checks of the fields of grids, calibrations and configs.

Each takes a value and where it stands, and returns the value as it is kept; a value of
another type raises TypeError, one out of range ValueError.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).tiny)

Check = Callable[[Any, str], Any]


def check(record: Any, **checks: Check) -> None:
    """Checks fields of a frozen dataclass, and keeps what the checks return.

    Args:
        record: the dataclass.
        **checks: for each field its check.
    """
    for name, checked in checks.items():
        where = f"{type(record).__name__}.{name}"
        object.__setattr__(record, name, checked(getattr(record, name), where))


def flag(value: Any, where: str) -> bool:
    """A bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{where} must be a bool, got {value!r}")
    return value


def instance(cls: Any, what: str) -> Check:
    """An object of a class, which the message describes."""

    def checked(value: Any, where: str) -> Any:
        if not isinstance(value, cls):
            raise TypeError(f"{where} must be {what}, got {value!r}")
        return value

    return checked


def integer(smallest: int, largest: int | None = None, hint: str = "") -> Check:
    """An int that is not a bool, within limits; the hint follows in the message."""

    def checked(value: Any, where: str) -> int:
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
    """None, or what a check takes."""
    return lambda value, where: None if value is None else checked(value, where)


def number(value: Any, where: str) -> float:
    """A number that float32 has, as a float.

    It is finite there, and 0 or normal: devices take subnormal ones for 0.
    """
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
    """A `number` from 0 on."""
    value = number(value, where)
    if value < 0:
        raise ValueError(f"{where} must not be negative, got {value}")
    return float(value)


def positive(value: Any, where: str) -> float:
    """A `number` above 0."""
    checked = number(value, where)
    if not checked > 0:
        raise ValueError(f"{where} must be positive, got {value}")
    return checked


def fraction(value: Any, where: str) -> float:
    """A `number` from 0 to below 1 in float32."""
    checked = number(value, where)
    if not 0 <= np.float32(checked) < 1:
        raise ValueError(
            f"{where} must be from 0 to below 1, in float32 as well, got {value}"
        )
    return checked


def percentage(value: Any, where: str) -> float:
    """A `positive` number up to 100."""
    checked = positive(value, where)
    if checked > 100:
        raise ValueError(f"{where} must be at most 100, got {value}")
    return checked
