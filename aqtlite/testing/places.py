"""Places along an axis of the inputs, looked for in any value made of them."""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

_LEAST_PADDED = 4


@dataclasses.dataclass(frozen=True)
class Places:
    """Places along an axis of the inputs, some of which have other values.

    A value does not say which of its axes is that axis. Its changes count as confined
    to the changed places if they are along any of its axes that may be it: one of the
    same size; one that contains it, merged with another, padded or cropped at an end;
    or two neighbours that it may have been cut into.
    """

    changed: np.ndarray
    """Which places have other values, bool of the size of the axis."""

    parts: tuple[np.ndarray, ...] = ()
    """Those parts of `changed` that a value may be of, in loops along the axis."""

    def in_step(self, number: int, steps: int) -> "Places":
        """Returns the places that a step of a loop along the axis may be of."""
        return dataclasses.replace(self, parts=(*self.parts, self._part(number, steps)))

    def confine(self, differs: np.ndarray) -> bool:
        """Whether changes of a value are confined to changed places.

        Args:
            differs: which elements of the value differ.
        """
        readings = itertools.chain(
            _padded(self.changed, differs.shape),
            *(_whole(one, differs.shape) for one in (self.changed, *self.parts)),
        )
        return _is_in_any(differs, readings)

    def lead(self, differs: np.ndarray) -> bool:
        """Whether a value changes along its first axis as the inputs do.

        Args:
            differs: which elements of the value differ.
        """
        steps = len(differs)
        if self.changed.size % steps or not differs.any():
            return False
        return all(
            _is_in_any(one, _whole(self._part(number, steps), one.shape))
            for number, one in enumerate(differs)
        )

    def _part(self, number: int, steps: int) -> np.ndarray:
        size = self.changed.size // steps
        return self.changed[number * size : (number + 1) * size]


def _is_in_any(differs: np.ndarray, readings: Iterator[np.ndarray]) -> bool:
    return not differs.any() or any(
        not (differs & ~may_differ).any() for may_differ in readings
    )


def _whole(changed: np.ndarray, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Yields which elements of a shape may differ, for axes with all of the places."""
    size = changed.size
    if size == 1:
        yield changed.reshape((1,) * len(shape))
        return
    for axis, count in enumerate(shape):
        if count and count % size == 0:
            for inner in {1, count // size}:
                yield _along(changed[np.arange(count) // inner % size], shape, axis)
    for axis, (first, second) in enumerate(itertools.pairwise(shape)):
        if first * second == size and 1 not in (first, second):
            yield _along(changed, shape, axis, axis + 1)


def _padded(changed: np.ndarray, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Yields which elements of a shape may differ, for axes with some more or less."""
    size = changed.size
    if size < _LEAST_PADDED:
        return
    for axis, count in enumerate(shape):
        if size < 2 * count < 4 * size and count != size:
            for before in (0, count - size):
                may_differ = changed[np.clip(np.arange(count) - before, 0, size - 1)]
                if not may_differ.all():
                    yield _along(may_differ, shape, axis)


def _along(changed: np.ndarray, shape: tuple[int, ...], *axes: int) -> np.ndarray:
    sizes = [count if axis in axes else 1 for axis, count in enumerate(shape)]
    return changed.reshape(sizes)
