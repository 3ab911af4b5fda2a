"""What every format of checkpoint has to offer for reading."""

import abc
import pathlib
from collections.abc import Mapping

import jax
import numpy as np

from aqtlite.checkpoint.arrays import ArrayInfo
from aqtlite.checkpoint.constants import Constant


class Source(abc.ABC):
    """A checkpoint whose arrays are read one by one.

    Arrays are named by their path in the tree, as `names.name_of` writes it.
    """

    path: pathlib.Path

    @property
    @abc.abstractmethod
    def arrays(self) -> Mapping[str, ArrayInfo]:
        """The arrays that it holds."""

    @property
    @abc.abstractmethod
    def values(self) -> Mapping[str, Constant]:
        """The leaves that are no arrays.

        Raises:
            CheckpointError: naming a leaf that is neither an array nor a constant.
        """

    @abc.abstractmethod
    def read(self, name: str) -> np.ndarray:
        """Reads one array.

        Raises:
            CheckpointError: if it cannot be read, or is not what `arrays` says.
        """

    @abc.abstractmethod
    def read_sharded(self, name: str, sharding: jax.sharding.Sharding) -> jax.Array:
        """Reads one array onto devices; a host reads the part that its devices hold."""

    @abc.abstractmethod
    def manifest(self) -> str | None:
        """The text that a conversion left in it, None if it is not converted."""

    @abc.abstractmethod
    def files(self) -> list[pathlib.Path]:
        """The files that it consists of."""
