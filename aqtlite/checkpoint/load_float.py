"""Reading the float variables of a model from a checkpoint of training."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from aqtlite.checkpoint import keys, nnx_variables, variables
from aqtlite.checkpoint.arrays import is_finite
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import Reader, Subtree, open_reader
from aqtlite.checkpoint.names import check_tree, path_name
from aqtlite.flax.linen.quantize_model import Model
from aqtlite.flax.nnx.model import QuantizedModel
from aqtlite.flax.nnx.quantize import as_quantized


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
    if isinstance(model, nnx.Module):
        return _of_nnx(source, as_quantized(model))
    template, origin = variables.match(source, model, args, kwargs)
    return read_variables(source, template, origin)


def read_variables(source: Reader, template: Any, origin: Mapping[str, str]) -> Any:
    """Reads the variables of a Linen module.

    Args:
        source: the checkpoint.
        template: their shapes, as `variables.match` returns them.
        origin: their names in the checkpoint, as `variables.match` returns them.

    Raises:
        CheckpointError: if one cannot be read, or holds NaN or infinities.
    """
    return jax.tree_util.tree_map_with_path(
        lambda key, _: _read(source, origin[path_name(key)]), template
    )


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


def _of_nnx(source: Reader, model: QuantizedModel) -> Any:
    shapes, origin = nnx_variables.match(source, model)
    theirs: dict[str, Any] = {}
    nnx_variables.with_leaves(model, lambda name, x, _: theirs.setdefault(name, x))

    def value(name: str, leaf: Any, variable: Any) -> Any:
        del variable
        if name in origin:
            x = _read(source, origin[name])
            return keys.as_key(x, leaf) if keys.is_key(leaf) else x
        if isinstance(theirs[name], jax.ShapeDtypeStruct):
            raise CheckpointError(
                f"{source.path} has no value for {name}, and neither has the model: "
                "make the model with its rngs and caches, not in nnx.eval_shape"
            )
        return theirs[name]

    return nnx.state(nnx_variables.with_leaves(shapes, value))


def _read(source: Reader, name: str) -> jax.Array:
    x = source.read(name)
    if jnp.issubdtype(x.dtype, jnp.floating) and not is_finite(x):
        raise CheckpointError(f"{name} in {source.path} holds NaN or infinities")
    return jnp.asarray(x)
