"""Reshapes: which axes of an array become which."""

from collections.abc import Sequence


def runs(
    operand: Sequence[int], out: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
    """Returns the smallest runs of axes with equal numbers of elements in both shapes.

    Axes of size one are in no run. Of symbolic sizes (`jax.export`), equal axes at both
    ends are runs, and all between them is one.

    >>> runs((2, 3, 4), (6, 1, 4))
    [([0, 1], [0]), ([2], [2])]
    """
    before, after = (
        [axis for axis, size in enumerate(shape) if size != 1]
        for shape in (operand, out)
    )
    if 0 in operand:
        return []
    if not all(isinstance(size, int) for size in (*operand, *out)):
        return _symbolic_runs(operand, out, before, after)
    found = []
    while before and after:
        taken: tuple[list[int], list[int]] = [before.pop(0)], [after.pop(0)]
        sizes = [operand[taken[0][0]], out[taken[1][0]]]
        while sizes[0] != sizes[1]:
            side = 0 if sizes[0] < sizes[1] else 1
            axis = (before, after)[side].pop(0)
            taken[side].append(axis)
            sizes[side] *= (operand, out)[side][axis]
        found.append(taken)
    return found


def _symbolic_runs(
    operand: Sequence[int], out: Sequence[int], before: list[int], after: list[int]
) -> list[tuple[list[int], list[int]]]:
    found = []
    for end in (0, -1):
        while before and after and operand[before[end]] == out[after[end]]:
            found.append(([before.pop(end)], [after.pop(end)]))
    return [*found, (before, after)] if before and after else found
