"""Checks of the fields of a `Tensor`."""

import math
import re
from collections.abc import Hashable

import jax.numpy as jnp
import numpy as np

from aqtlite import numerics as grids


def checked_axes(axes: object, name: str, remedy: str) -> tuple[int, ...]:
    """Returns axes as a tuple; raises TypeError or ValueError if they are none."""
    if not isinstance(axes, tuple | list):
        raise TypeError(f"{name}={axes!r} is not a tuple; {remedy}")
    for axis in axes:
        if isinstance(axis, bool) or not isinstance(axis, int):
            raise TypeError(
                f"{name}={axes!r} holds {axis!r}, which is not an int; {remedy}"
            )
    if not axes:
        raise ValueError(f"{name} is empty; {remedy}")
    if len(set(axes)) < len(axes):
        raise ValueError(f"{name}={axes!r} repeats an axis; name each once")
    return tuple(axes)


def grid_of_name(name: object) -> str:
    """Suggests the grid that a dtype or dtype name was meant to be."""
    text = getattr(name, "name", getattr(name, "__name__", name))
    if not isinstance(text, str):
        return ""
    if integer := re.fullmatch(r"(u?)int(\d+)", text):
        grid = "IntAffine" if integer[1] else "IntSymmetric"
        return f"; {text} is numerics.{grid}(bits={integer[2]})"
    if re.fullmatch(r"float[468]_\w+", text):
        return f"; {text} is numerics.Float.from_dtype({text!r})"
    if text in ("fp8", "float8"):
        return "; fp8 is numerics.Float.from_dtype('float8_e4m3fn')"
    return ""


def check_grid(grid: grids.Numerics) -> None:
    """Raises TypeError or ValueError for an invalid grid, perhaps of a user's class."""
    name = type(grid).__name__
    if not isinstance(grid, Hashable):
        raise TypeError(
            f"numerics: {name} must be a frozen dataclass, so that configs can be "
            "compared and hashed; decorate it with @dataclasses.dataclass(frozen=True)"
        )
    if grid.arithmetic not in ("integer", "float", "table"):
        raise ValueError(
            f"numerics: {name}.arithmetic must be 'integer', 'float' or 'table', got "
            f"{grid.arithmetic!r}"
        )
    bound = grid.bound
    if not isinstance(bound, int | float) or not 0 < bound < math.inf:
        raise ValueError(
            f"numerics: {name}.bound must be a positive, finite number, got {bound!r}"
        )
    storage = np.dtype(grid.storage_dtype)
    is_integer = jnp.issubdtype(storage, jnp.integer)
    if grid.arithmetic == "integer" and not (
        is_integer and jnp.iinfo(storage).bits <= 16
    ):
        raise ValueError(
            f"numerics: {name}.arithmetic is 'integer', which takes storage of up to "
            f"16 bits, but {name}.storage_dtype is {storage.name}"
        )
    if grid.arithmetic == "float" and not jnp.issubdtype(storage, jnp.floating):
        raise ValueError(
            f"numerics: {name}.arithmetic is 'float', but {name}.storage_dtype is "
            f"{storage.name}"
        )
    if grid.zero_point_range is not None:
        smallest, largest = grid.zero_point_range
        limits = jnp.iinfo(storage) if is_integer else None
        if limits is None or not limits.min <= smallest < largest <= limits.max:
            raise ValueError(
                f"numerics: {name}.zero_point_range={grid.zero_point_range} is not a "
                f"range of {storage.name}, its storage_dtype"
            )
    elif grid.arithmetic == "integer" and grid.bound / grid.unit > (
        jnp.iinfo(storage).max + 1
    ):
        raise ValueError(
            f"numerics: {name}.bound={bound} is beyond the values of {storage.name}, "
            "its storage_dtype"
        )
