"""Leaves of a checkpoint that are no arrays: they are copied as they are."""

from typing import Any

Constant = bool | int | float | str | None


def is_constant(x: Any) -> bool:
    """Whether it is a plain Python number, a string or None."""
    return x is None or type(x) in (bool, int, float, str)
