"""Checks of the numbers in a calibration."""

import numpy as np

_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).tiny)


def checked(value: object, where: str) -> float:
    """A number that float32 has, as a float.

    Args:
        value: what the user gave.
        where: the class and the field, for the message.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is not finite in float32, or not 0 and subnormal there, which
            devices take for 0.
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


def checked_fraction(value: object, where: str) -> float:
    """A number from 0 to below 1 in float32, as a float.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is anything else.
    """
    number = checked(value, where)
    if not 0 <= np.float32(number) < 1:
        raise ValueError(
            f"{where} must be from 0 to below 1, in float32 as well, got {value}"
        )
    return number


def checked_positive(value: object, where: str) -> float:
    """A number that is positive, finite and normal in float32, as a float.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is anything else.
    """
    number = checked(value, where)
    if not number > 0:
        raise ValueError(f"{where} must be positive, got {value}")
    return number


def checked_positive_or_none(value: object, where: str) -> float | None:
    """None, or a number as `checked_positive` takes it.

    Raises:
        TypeError: if it is neither.
        ValueError: if the number is not positive, finite and normal in float32.
    """
    return None if value is None else checked_positive(value, where)
