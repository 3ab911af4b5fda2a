"""A float checkpoint, with statistics gathered for its conversion."""

import pathlib
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from aqtlite.checkpoint.arrays import ArrayInfo, checksum
from aqtlite.checkpoint.formats import Reader
from aqtlite.checkpoint.load_float import read_variables
from aqtlite.checkpoint.variables import Variables


class Calibrated(Reader):
    """Variables from a checkpoint, with statistics in memory added or replaced."""

    def __init__(
        self,
        source: Reader,
        origin: Mapping[str, str],
        statistics: Mapping[str, np.ndarray],
    ):
        """Joins a checkpoint and statistics.

        Args:
            source: the float checkpoint.
            origin: name in `source` of each variable, by name in the model.
            statistics: the statistics, by name in the model.
        """
        self.path = source.path
        self.subtree = source.subtree
        self._source = source
        self._origin = {k: v for k, v in origin.items() if k not in statistics}
        self._statistics = statistics
        sums = [checksum(statistics[name]) for name in sorted(statistics)]
        self.in_memory = f"{zlib.crc32(np.array(sums).tobytes()):08x}"

    @property
    def arrays(self) -> Mapping[str, ArrayInfo]:
        theirs = self._source.arrays
        return {
            **{name: theirs[place] for name, place in self._origin.items()},
            **{k: ArrayInfo(x.shape, x.dtype) for k, x in self._statistics.items()},
        }

    @property
    def others(self) -> Mapping[str, str]:
        return {}

    def read(self, name: str) -> np.ndarray:
        if name in self._statistics:
            return self._statistics[name]
        return self._source.read(self._origin[name])

    def manifest(self) -> str | None:
        return None

    def files(self) -> list[pathlib.Path]:
        return self._source.files()


def calibrated(source: Reader, variables: Variables, batches: Iterable[Any]) -> Reader:
    """Runs a model with the variables of a checkpoint to gather statistics.

    Args:
        source: the float checkpoint. Statistics in it are updated further.
        variables: the variables of the model.
        batches: as `aqtlite.flax.calibrate_in_float` takes them.

    Raises:
        CheckpointError: if the source is not of this model.
        ValueError: as `aqtlite.flax.calibrate_in_float` does.
    """
    template, origin = variables.match(source)
    values = read_variables(source, variables, template, origin)
    return Calibrated(source, origin, variables.gather(values, batches))
