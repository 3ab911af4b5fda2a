"""Where the parameters of LoRA adapters are in the files of PEFT."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aqtlite.checkpoint import name_map, placeholders
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.move import Move
from aqtlite.checkpoint.names import path_name, steps_of
from aqtlite.quantization.states.state_collections import ADAPTER, PARAMETERS

MAGNITUDE = "magnitude"
NAMES = {
    "lora_a": "lora_A.weight",
    "lora_b": "lora_B.weight",
    MAGNITUDE: "lora_magnitude_vector",
}


STACKED = (
    "their weights are stacked. Of the layers of a scan, name each by moves=, such as "
    "Move(sources='layers.{i}.up.weight', targets='params/layers/up/kernel', "
    "axes=(1, 0)); PEFT has no adapters of experts"
)
"""What to do with the adapters of stacked weights, for messages."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the parameter of an adapter is in a file."""

    path: str
    """Path of its module or weight in the model."""

    name: str
    """``lora_a``, ``lora_b`` or ``magnitude``."""

    modules: tuple[str, ...]
    """Modules of PEFT's model, one for each layer."""

    is_stacked: bool
    move: Move | None
    part: int

    def read(self, key: str, x: np.ndarray, rank: int) -> np.ndarray:
        """Returns a matrix of the file as the rank and one other axis, transposed."""
        if self.name == MAGNITUDE:
            if x.ndim != 1:
                raise CheckpointError(f"{key} has the shape {x.shape}, no vector")
            return x[self._part(len(x))].astype(np.float32)
        axis = 0 if self.name == "lora_a" else 1
        if x.ndim != 2 or x.shape[axis] != rank:
            raise CheckpointError(
                f"{key} has the shape {x.shape}, which is no matrix of rank {rank}"
            )
        if self.name == "lora_b":
            x = x[self._part(len(x))]
        return x.T.astype(np.float32)

    def _part(self, outputs: int) -> slice:
        if self.move is None:
            return slice(None)
        return name_map.part_of(self.move, self.part, outputs)

    def shape_in_file(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of what `read` returns, of all layers.

        Args:
            shape: shape of the parameter.
        """
        layers, one = (shape[:1], shape[1:]) if self.is_stacked else ((), shape)
        if self.name == MAGNITUDE:
            return (*layers, math.prod(one))
        if self.name == "lora_a":
            return (*layers, math.prod(one[:-1]), *one[-1:])
        return (*layers, *one[:1], math.prod(one[1:]))

    def difference(self, matrix: np.ndarray, start: np.ndarray) -> np.ndarray:
        """Returns a matrix of the adapter that adds the difference of two others.

        Args:
            matrix: what `written` returns of one.
            start: what it returns of the other one, which is subtracted.
        """
        if self.name == MAGNITUDE:
            return matrix
        if self.name == "lora_a":
            return np.concatenate([matrix, start])
        return np.concatenate([matrix, -start], axis=1)

    def written(self, x: np.ndarray, rank: int) -> np.ndarray:
        """Returns a parameter as the matrix of the file."""
        if self.name == MAGNITUDE:
            return x.reshape(-1)
        axis = -1 if self.name == "lora_a" else 0
        if x.shape[axis] != rank:
            raise CheckpointError(
                f"{self.name} of {self.path} has the shape {x.shape}, and the rank is "
                f"{rank}: {STACKED}"
            )
        matrix = x.reshape(-1, rank) if axis else x.reshape(rank, -1)
        return np.ascontiguousarray(matrix.T)


def place_of(
    key_path: tuple[Any, ...], moves: Sequence[Move], shape: tuple[int, ...]
) -> Place:
    """Returns where a leaf of a tree of adapters is in a file.

    Raises:
        CheckpointError: if no line of the map, or several, make its weight, or if there
            is no map, and its layer is the whole model, which has no name.
    """
    steps = steps_of(path_name(key_path))
    at = steps.index(ADAPTER) if ADAPTER in steps[:-1] else 0
    # A box of sharding metadata may follow.
    name = steps[at + 1] if at else ""
    if not at or name not in NAMES:
        raise CheckpointError(f"{'/'.join(steps)} is no parameter of an adapter")
    above = steps[: at - 1] if steps[at - 1].startswith("aqt_") else steps[:at]
    if above[:2] == ("aqt", "learned"):  # Of NNX, in the attribute of a model.
        above = above[2:]
    path = "/".join(above).removeprefix(f"{PARAMETERS}/")
    if not moves and not path:
        raise CheckpointError(
            f"{'/'.join(steps)} is of a model that is one layer, and a file names the "
            "layers in a model: give the name by moves=, such as [Move("
            "sources='head.weight', targets='params/kernel', axes=(1, 0))]"
        )
    if not moves:
        return Place(path, name, (path.replace("/", "."),), False, None, 0)
    found = []
    for move in moves:
        for part, target in enumerate(move.targets):
            target = target.removeprefix(f"{PARAMETERS}/")
            for one in {target, target.rpartition("/")[0]}:
                match = placeholders.pattern_of(one).fullmatch(path)
                if match is not None and _is_matrix(move):
                    found.append((move, part, match.groupdict()))
    if len(found) != 1:
        count = "no line" if not found else f"{len(found)} lines"
        name_of_layer = path or "the model, which is one layer"
        raise CheckpointError(f"{count} of the map make the weight of {name_of_layer}")
    ((move, part, values),) = found
    if len(move.sources) > 1:
        raise CheckpointError(
            f"the weight of {path} is joined of {move.sources}, whose adapters have "
            "no common matrix"
        )
    source = move.sources[0]
    names = (
        [placeholders.filled(source, values)]
        if move.stacked is None
        else [
            placeholders.filled(source, {**values, move.stacked: str(i)})
            for i in range(shape[0])
        ]
    )
    modules = tuple(one.removesuffix(".weight") for one in names)
    return Place(path, name, modules, move.stacked is not None, move, part)


def _is_matrix(move: Move) -> bool:
    """Whether a line moves weights, not the biases beside them."""
    return not any(source.endswith(".bias") for source in move.sources)
