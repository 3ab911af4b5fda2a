"""Reading the float variables of a model from a checkpoint of training."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from aqtlite.checkpoint.arrays import is_finite
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import Reader, Subtree, open_reader
from aqtlite.checkpoint.linen import LinenVariables
from aqtlite.checkpoint.names import check_tree
from aqtlite.checkpoint.nnx import NnxVariables
from aqtlite.checkpoint.variables import Variables
from aqtlite.flax.linen.quantize_model import Model


def load_float(
    path: str | os.PathLike,
    model: Model | nnx.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    subtree: Sequence[str] = (),
) -> Any:
    """Reads the variables of a model, as they were trained.

    Args:
        path: the checkpoint, in any format that `convert_checkpoint` reads.
        model: a Linen or NNX module; an NNX module may have shapes in its variables.
        args: sample inputs of the model; shapes will do.
        kwargs: sample inputs by name; shapes will do.
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
    """The variables of a model that is called with sample inputs."""
    if isinstance(model, nnx.Module):
        return NnxVariables(model, args, kwargs)
    return LinenVariables(model, args, kwargs)


def read_variables(
    source: Reader, variables: Variables, template: Any, origin: Mapping[str, str]
) -> Any:
    """Reads the variables of a model.

    Args:
        source: the checkpoint.
        variables: variables of the model.
        template: their shapes, as `Variables.match` returns them.
        origin: their names in the checkpoint, as `Variables.match` returns them.

    Raises:
        CheckpointError: if one cannot be read, or holds NaN or infinities.
    """
    return variables.filled(template, origin, lambda name: _read(source, origin[name]))


def open_float(path: pathlib.Path, subtree: tuple[str, ...]) -> Reader:
    """Opens the checkpoint of a trained model.

    Args:
        path: path of the checkpoint.
        subtree: paths in the checkpoint, as `convert_checkpoint` takes them.

    Raises:
        CheckpointError: if there is none, or it is a converted one.
    """
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
