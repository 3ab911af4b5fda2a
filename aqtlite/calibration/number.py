"""Checks of the numbers in a calibration."""

import numpy as np


def checked(value: object, where: str) -> float:
    """A finite number as a float.

    Args:
        value: what the user gave.
        where: the class and the field, for the message.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is not finite in float32.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{where} must be a number, got {value!r}")
    if not abs(value) <= float(np.finfo(np.float32).max):
        raise ValueError(f"{where} must be finite in float32, got {value}")
    return float(value)


def checked_positive(value: object, where: str) -> float:
    """A number that is positive, finite and normal in float32, as a float.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is anything else.
    """
    number = checked(value, where)
    if not number >= float(np.finfo(np.float32).tiny):
        raise ValueError(
            f"{where} must be positive, and at least 2^-126, the smallest normal "
            f"float32, got {value}"
        )
    return number


def checked_positive_or_none(value: object, where: str) -> float | None:
    """None, or a number as `checked_positive` takes it.

    Raises:
        TypeError: if it is neither.
        ValueError: if the number is not positive, finite and normal in float32.
    """
    return None if value is None else checked_positive(value, where)
