"""Float checkpoints of trained models: opened, read, and calibrated."""

import os
import pathlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from aqtlite.calibration import batches as batches_lib
from aqtlite.checkpoint.arrays import ArrayInfo, checksum, is_finite
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import Reader, Subtree, open_reader
from aqtlite.checkpoint.linen import LinenVariables
from aqtlite.checkpoint.names import check_tree
from aqtlite.checkpoint.nnx import NnxVariables
from aqtlite.checkpoint.one_process import own
from aqtlite.checkpoint.read_quantized import is_quantized
from aqtlite.checkpoint.variables import Variables
from aqtlite.flax.linen.quantize_model import Model
from aqtlite.qtensor.qtensor import QTensor


def load_float(
    path: str | os.PathLike,
    model: Model | nnx.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    subtree: Sequence[str] = (),
) -> Any:
    """Reads the trained float variables of a model.

    Args:
        path: path of the checkpoint, in any format that `convert_checkpoint` reads.
        model: a Linen or NNX module; an NNX module may be abstract.
        args: sample inputs of the model, or their shapes.
        kwargs: sample inputs by name, or their shapes.
        subtree: paths in the checkpoint, as `convert_checkpoint` takes them.

    Returns:
        The variables of a Linen module, or the `nnx.State` of an NNX module.

    Raises:
        CheckpointError: if the checkpoint is damaged, is not of this model, or holds
            NaN or infinities; or if the model cannot be traced with the inputs.
    """
    source = open_float(pathlib.Path(path), tuple(subtree))
    variables = variables_of(model, args, kwargs)
    template, origin = variables.match(source)
    filled = read_variables(source, variables, template, origin)
    return nnx.state(filled) if isinstance(filled, nnx.Module) else filled


def variables_of(
    model: Model | nnx.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Variables:
    """Names and shapes of a model's variables, from a call with sample inputs."""
    if isinstance(model, nnx.Module):
        return NnxVariables(model, args, kwargs)
    return LinenVariables(model, args, kwargs)


def read_variables(
    source: Reader, variables: Variables, template: Any, origin: Mapping[str, str]
) -> Any:
    """Reads the values of a model's variables.

    Args:
        source: the checkpoint.
        variables: variables of the model.
        template: shapes of the variables, from `Variables.match`.
        origin: names of the variables in the checkpoint, from `Variables.match`.

    Raises:
        CheckpointError: if an array cannot be read, or holds NaN or infinities.
    """
    return variables.filled(
        template, origin, lambda name: _read(source, origin[name]), {}
    )


def open_float(path: pathlib.Path, subtree: tuple[str, ...]) -> Reader:
    """Opens the checkpoint of a trained model.

    Args:
        path: path of the checkpoint.
        subtree: paths in the checkpoint, as `convert_checkpoint` takes them.

    Raises:
        CheckpointError: if there is no checkpoint, or it is a converted one.
    """
    if is_quantized(path):
        raise CheckpointError(
            f"{path} is a quantized checkpoint of another library: "
            "checkpoint.load_quantized reads it, and a map of its names (moves=, "
            "--map) converts it"
        )
    source = open_reader(path)
    if source.manifest() is not None:
        raise CheckpointError(
            f"{path} is converted already; name the float checkpoint of training"
        )
    if subtree:
        source = Subtree(source, subtree)
    check_tree([*source.arrays, *source.others], str(path))
    return source


def _read(source: Reader, name: str) -> jax.Array:
    x = source.read(name)
    if jnp.issubdtype(x.dtype, jnp.floating) and not is_finite(x):
        raise CheckpointError(f"{name} in {source.path} holds NaN or infinities")
    return jnp.asarray(x)


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
        return self.read_weight(name)[0]

    @property
    def quantized(self) -> frozenset[str]:
        theirs = self._source.quantized
        return frozenset(k for k, v in self._origin.items() if v in theirs)

    def read_weight(self, name: str) -> tuple[np.ndarray, QTensor | None]:
        if name in self._statistics:
            return self._statistics[name], None
        return self._source.read_weight(self._origin[name])

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
        CheckpointError: if the source is not of this model, or a batch has parts in
            other processes, which do not run the model.
        ValueError: as `aqtlite.flax.calibrate_in_float` does.
    """
    template, origin = variables.match(source)
    values = read_variables(source, variables, template, origin)
    here = (own(batch, "a batch") for batch in batches_lib.check(batches))
    return Calibrated(source, origin, variables.gather(values, here))
