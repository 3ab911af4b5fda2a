"""The multiple-choice knapsack: one option for each group, at least cost, under a size.

By the mixed-integer solver of SciPy (HiGHS).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize, sparse

from aqtlite.allocation import quiet


class Option(NamedTuple):
    """One of the options of a group."""

    cost: float
    """Cost; an option whose cost is not finite is never taken."""

    size: int


def smallest(groups: Sequence[Sequence[Option]]) -> int:
    """Returns the least total size."""
    return sum(min(one.size for one in _possible(options)) for options in groups)


def solve(groups: Sequence[Sequence[Option]], limit: int) -> list[int] | None:
    """Returns the options of least total cost within a total size.

    >>> kernel = [Option(0.0, 8), Option(1.0, 4), Option(3.0, 2)]
    >>> solve([kernel, kernel], 10)
    [1, 1]
    >>> solve([kernel, kernel], 3) is None
    True

    Args:
        groups: the options of each group, of which at least one has a finite cost.
        limit: bound of the total size.

    Returns:
        The index of an option for each group; None if no choice is small enough.
    """
    if smallest(groups) > limit:
        return None
    flat = [
        (group, index, option)
        for group, options in enumerate(groups)
        for index, option in enumerate(options)
        if math.isfinite(option.cost)
    ]
    costs = np.array([option.cost for _, _, option in flat])
    # The tolerances of the solver are absolute.
    costs = 1e3 * (costs / (np.abs(costs).max() or 1.0))
    sizes = np.array([option.size for _, _, option in flat], float)
    places = np.arange(len(flat))
    of_group = sparse.csr_array(
        (np.ones(len(flat)), ([group for group, _, _ in flat], places))
    )
    scale, bound = max(limit, 1), limit
    while True:
        with quiet.without_stray_lines():
            solved = optimize.milp(
                costs,
                integrality=np.ones(len(flat)),
                bounds=optimize.Bounds(0, 1),
                constraints=[
                    optimize.LinearConstraint(of_group, 1, 1),
                    optimize.LinearConstraint(sizes / scale, ub=bound / scale),
                ],
                options={"mip_rel_gap": 0.0},
            )
        if solved.x is None:
            return _smallest_choice(groups)
        taken = [flat[place] for place in np.flatnonzero(solved.x > 0.5)]
        excess = sum(option.size for _, _, option in taken) - limit
        if excess <= 0:
            return [index for _, index, _ in taken]
        # Feasible within the solver's tolerance only.
        bound -= excess


def _possible(options: Sequence[Option]) -> list[Option]:
    return [one for one in options if math.isfinite(one.cost)]


def _smallest_choice(groups: Sequence[Sequence[Option]]) -> list[int]:
    """Returns the smallest option of each group, and the cheapest of several."""
    return [
        min(
            (i for i, one in enumerate(options) if math.isfinite(one.cost)),
            key=lambda i: (options[i].size, options[i].cost),
        )
        for options in groups
    ]
