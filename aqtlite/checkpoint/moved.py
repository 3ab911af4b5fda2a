"""A checkpoint of another library, read by the names of a model's variables."""

import pathlib
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from aqtlite.checkpoint.arrays import ArrayInfo
from aqtlite.checkpoint.formats import Reader
from aqtlite.checkpoint.move import Move, moves_to_json
from aqtlite.checkpoint.name_map import in_float, move_weights
from aqtlite.checkpoint.read_quantized import files_of, load_quantized
from aqtlite.qtensor.qtensor import QTensor


class Moved(Reader):
    """Float variables that a map makes of a checkpoint; quantized ones are decoded."""

    def __init__(self, path: pathlib.Path, moves: Sequence[Move]):
        """Opens a checkpoint.

        Args:
            path: a checkpoint that `load_quantized` reads, float or quantized.
            moves: the map.

        Raises:
            CheckpointError: if the checkpoint is damaged, or the map does not fit it.
        """
        self.path = path
        self.in_memory = f"{zlib.crc32(moves_to_json(moves).encode()):08x}"
        self._moved = move_weights(load_quantized(path), moves)

    @property
    def arrays(self) -> Mapping[str, ArrayInfo]:
        return {
            name: ArrayInfo(info.shape, np.dtype(info.dtype))
            for name, info in self._moved.infos.items()
        }

    @property
    def others(self) -> Mapping[str, str]:
        return {}

    def read(self, name: str) -> np.ndarray:
        return self.read_weight(name)[0]

    @property
    def quantized(self) -> frozenset[str]:
        return self._moved.quantized

    def read_weight(self, name: str) -> tuple[np.ndarray, QTensor | None]:
        x = self._moved[name]
        dtype = self._moved.infos[name].dtype
        values = np.asarray(in_float(x)).astype(dtype, copy=False)
        return values, x if isinstance(x, QTensor) else None

    def manifest(self) -> str | None:
        return None

    def files(self) -> list[pathlib.Path]:
        return files_of(self.path)
