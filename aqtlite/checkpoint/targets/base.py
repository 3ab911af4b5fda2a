"""What every format of checkpoint has to offer for writing."""

import abc
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from aqtlite.checkpoint.arrays import LazyArray
from aqtlite.checkpoint.manifest import Stored


class Target(abc.ABC):
    """Writes a checkpoint array by array."""

    @abc.abstractmethod
    def check(self, arrays: Mapping[str, Stored]) -> None:
        """Refuses arrays that the format cannot hold.

        Raises:
            CheckpointError: naming the first of them.
        """

    @abc.abstractmethod
    def owns(self, path: pathlib.Path, names: Iterable[str]) -> bool:
        """Whether a checkpoint of these arrays holds nothing but what `write` wrote.

        What else lies there would be lost with it.
        """

    @abc.abstractmethod
    def write(
        self,
        path: pathlib.Path,
        arrays: Sequence[LazyArray],
        manifest: Callable[[], str],
    ) -> None:
        """Writes a checkpoint where there is nothing yet.

        Args:
            path: a file or a folder, as the format has it.
            arrays: read one after the other, once each.
            manifest: the text to store with them; empty for none. It is asked for
                before the first array and after the last, and must have the same
                length both times.
        """
