"""Resolution of ranges to the grids of a program's values."""

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import calibration, numerics
from aqtlite.edge.grid import Grid
from aqtlite.edge.operators import arithmetic
from aqtlite.edge.program import Program
from aqtlite.edge.ranges import Range, Ranges

GRIDS: dict[str, numerics.Numerics] = {
    "int8": numerics.IntAffine(bits=8, signed=True),
    "int16": numerics.IntSymmetric(bits=16, preserve_max_val=True),
}
"""Number grid of activations, by dtype."""

_LARGEST = 1e30
"""Largest magnitude of an end of a range."""

_SMALLEST = 1e-12
"""Smallest width of a range that raises no warning."""


def check(ranges: Any) -> None:
    """Raises TypeError if `ranges` is not a table of ranges."""
    if not isinstance(ranges, Ranges):
        raise TypeError(
            "ranges must be what edge.calibrate or edge.Ranges.load returned, got a "
            f"{type(ranges).__name__}"
        )


def resolve(program: Program, ranges: Mapping[str, Range]) -> dict[int, Grid]:
    """Returns the grids of all values that are computed from the inputs, by number.

    Args:
        program: the program.
        ranges: ranges of the model's values, by name.

    Raises:
        TypeError: if `ranges` is not a table of ranges.
        ValueError: if ranges are missing, belong to unknown values, or are wider than
            runtimes support.
    """
    check(ranges)
    wanted = program.ranged_groups
    if not program.rounded_groups:
        # A program in float needs no ranges, and accepts any table.
        return {}
    missing, unknown = (
        sorted(wanted.keys() - set(ranges)),
        sorted(set(ranges) - wanted.keys()),
    )
    if missing or unknown:
        raise ValueError(
            "the table of ranges is of another program, or of other rules: "
            + "; ".join(
                f"{what} {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
                for what, names in (
                    ("it lacks", missing),
                    ("the program has no", unknown),
                )
                if names
            )
            + ". Calibrate again"
        )
    _check_widths({name: ranges[name] for name in wanted})
    grids = {
        value: group.fixed
        for group in program.rounded_groups
        for value in group.members
        if group.fixed is not None
    }
    zeros = [name for name in wanted if _is_zero(ranges[name])]
    for name, group in wanted.items():
        grids.update(dict.fromkeys(group.members, of_range(ranges[name], group.dtype)))
    of_zeros = {value for name in zeros for value in wanted[name].members}
    for name in zeros:
        found = _of_sums(program, wanted[name].members, of_zeros, grids)
        if found is not None and found.dtype == wanted[name].dtype:
            grids.update(dict.fromkeys(wanted[name].members, found))
    return grids


def _is_zero(reached: Range) -> bool:
    """Whether a value is zero, as far as is known: ranges are made to include it."""
    return reached.high - reached.low < _SMALLEST


def _of_sums(
    program: Program,
    zeros: Collection[int],
    every_zero: Collection[int],
    grids: Mapping[int, Grid],
) -> Grid | None:
    """The grid of a sum that zeros are added to; None if they are added to none.

    Steps of zeros may be of any size, and those of what is added to a sum are not to be
    larger than its range.
    """
    for node in program.graph.nodes:
        is_sum = isinstance(node.operator, arithmetic.Add | arithmetic.Subtract)
        if is_sum and node.output not in every_zero and set(zeros) & {*node.inputs}:
            return grids.get(node.output)
    return None


def _check_widths(ranges: Mapping[str, Range]) -> None:
    """Warns of ranges that are practically a single point.

    Raises:
        ValueError: if a range is wider than runtimes support.
    """
    degenerate = []
    for name, reached in ranges.items():
        low, high = reached
        if max(-low, high) > _LARGEST:
            raise ValueError(
                f"the range of {name!r} is [{low:.4g}, {high:.4g}]: runtimes compute "
                f"with scales of ranges up to {_LARGEST:.0e}. Calibrate without such "
                "values, or give another range by Ranges.replace"
            )
        if _is_zero(reached):
            degenerate.append(f"{name!r}: [{low:.4g}, {high:.4g}]")
    if degenerate:
        warnings.warn(
            "these ranges have no width, and their integers stand for one number. "
            "Calibrate with examples that give the values other numbers than zero, or "
            "give them a range by Ranges.replace:\n  " + "\n  ".join(degenerate),
            stacklevel=4,
        )


def of_range(reached: Range, dtype: str) -> Grid:
    """The grid of a range: affine for int8, symmetric for int16.

    Args:
        reached: the range, extended to include zero.
        dtype: "int8" or "int16".
    """
    grid = GRIDS[dtype]
    # Grids are concrete, even while a program is being traced.
    with jax.ensure_compile_time_eval():
        low, high = (jnp.float32(end) for end in reached)
        found = calibration.Range(high, low)
        if grid.zero_point_range is None:
            found = calibration.Range(jnp.maximum(jnp.abs(low), jnp.abs(high)))
        scale, zero_point = calibration.scale_and_zero_point(found, grid, po2=False)
        offset = 0 if zero_point is None else int(zero_point)
        return Grid(np.asarray(scale, np.float32), offset, dtype)
