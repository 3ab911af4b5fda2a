"""Interfaces of a checkpoint format: reading and writing array by array.

Arrays are named by their path in the tree of variables, as `names.name_of` writes it.
"""

import abc
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from aqtlite.checkpoint.arrays import ArrayInfo, LazyArray


class Sliceable(Protocol):
    """An array of which slices can be read."""

    def __getitem__(self, index: tuple[slice, ...], /) -> np.ndarray: ...


class Reader(abc.ABC):
    """A checkpoint whose arrays are read one at a time."""

    path: pathlib.Path

    subtree: tuple[str, ...] = ()
    """Paths in the checkpoint that the names are relative to; ``()`` for its root."""

    in_memory: str = ""
    """A checksum of arrays that are in memory, not in the files; empty if none is."""

    @property
    @abc.abstractmethod
    def arrays(self) -> Mapping[str, ArrayInfo]:
        """Shapes and dtypes of the arrays, by name."""

    @property
    @abc.abstractmethod
    def others(self) -> Mapping[str, str]:
        """Leaves that cannot be converted, each with its description.

        Numbers, strings, elements of lists, ...; None is no leaf.
        """

    @abc.abstractmethod
    def read(self, name: str) -> np.ndarray:
        """Reads one array.

        Raises:
            CheckpointError: if it cannot be read, or is not what `arrays` says.
        """

    def slices(self, name: str) -> Sliceable:
        """Reads slices of one array, where the format can."""
        return self.read(name)

    @abc.abstractmethod
    def manifest(self) -> str | None:
        """The manifest of a converted checkpoint; None if it is not converted."""

    @abc.abstractmethod
    def files(self) -> list[pathlib.Path]:
        """The files of the checkpoint."""


class Writer(abc.ABC):
    """Writes checkpoints array by array."""

    @abc.abstractmethod
    def check(self, arrays: Mapping[str, ArrayInfo]) -> None:
        """Checks that the format can hold arrays.

        Raises:
            CheckpointError: naming the first that it cannot.
        """

    @abc.abstractmethod
    def owns(self, path: pathlib.Path, names: Iterable[str]) -> bool:
        """Checks that a checkpoint of these arrays has no files beside its own."""

    @abc.abstractmethod
    def write(
        self,
        path: pathlib.Path,
        arrays: Sequence[LazyArray],
        manifest: Callable[[], str],
    ) -> None:
        """Writes a new checkpoint.

        Args:
            path: a file or a folder that does not exist.
            arrays: read one after the other, once each.
            manifest: returns the text to store with them; empty for none. It is called
                before the first array and after the last, and both texts must have
                the same length.
        """
