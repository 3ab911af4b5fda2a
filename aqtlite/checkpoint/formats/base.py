"""Interfaces of checkpoint formats, for reading and writing array by array.

An array is named by its path in the tree of variables, as written by `names.name_of`.
"""

import abc
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from aqtlite.checkpoint.arrays import ArrayInfo, LazyArray
from aqtlite.qtensor.qtensor import QTensor


class Sliceable(Protocol):
    """An array that is read slice by slice."""

    def __getitem__(self, index: tuple[slice, ...], /) -> np.ndarray: ...


class Reader(abc.ABC):
    """A checkpoint whose arrays are read one at a time."""

    path: pathlib.Path

    subtree: tuple[str, ...] = ()
    """Paths in the checkpoint that names are relative to; ``()`` for the root."""

    in_memory: str = ""
    """Checksum of the arrays that are in memory and not in files; empty if none are."""

    @property
    @abc.abstractmethod
    def arrays(self) -> Mapping[str, ArrayInfo]:
        """Shapes and dtypes of the arrays, by name."""

    @property
    @abc.abstractmethod
    def others(self) -> Mapping[str, str]:
        """Descriptions of the leaves that cannot be converted, by name.

        Numbers, strings, elements of lists, and so on; None does not count as a leaf.
        """

    @abc.abstractmethod
    def read(self, name: str) -> np.ndarray:
        """Reads one array.

        Raises:
            CheckpointError: if it cannot be read, or disagrees with `arrays`.
        """

    @property
    def quantized(self) -> frozenset[str]:
        """Names of the arrays that are decoded from quantized weights, if any are."""
        return frozenset()

    def read_weight(self, name: str) -> tuple[np.ndarray, QTensor | None]:
        """Reads one array, and the quantized weight that it is decoded from, if any."""
        return self.read(name), None

    def slices(self, name: str) -> Sliceable:
        """One array to read slices of; read as a whole if the format has no slices."""
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
            CheckpointError: if it cannot; the message names the first such array.
        """

    @abc.abstractmethod
    def owns(self, path: pathlib.Path, names: Iterable[str]) -> bool:
        """Whether a path holds only files of a checkpoint with these arrays."""

    @abc.abstractmethod
    def write(
        self,
        path: pathlib.Path,
        arrays: Sequence[LazyArray],
        manifest: Callable[[], str],
    ) -> None:
        """Writes a new checkpoint.

        Args:
            path: path of a file or a folder that does not exist yet.
            arrays: arrays to write, each read once, in order.
            manifest: function that returns the manifest to store; empty for none. It
                is called before the first array and after the last, and both texts
                must have the same length.
        """
