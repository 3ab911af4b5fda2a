"""Variables with the weights of a source as their values, quantized ones included."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.names import path_name, steps_of
from aqtlite.qtensor.qtensor import QTensor


def fill(
    variables: Any, weights: Mapping[str, QTensor | np.ndarray | jax.Array]
) -> Any:
    """Returns variables with the weights of a source as their values.

    What is quantized stays so: `aqtlite.flax.convert`, `aqtlite.flax.nnx.convert` and
    `aqtlite.convert_function` freeze the integers of such parameters as they are, where
    the config of the contraction has their grid and blocks (`config_of`) and the model
    only moves them; else they round again, and say so.

    >>> import aqtlite
    >>> from aqtlite import checkpoint, config, numerics
    >>> int4 = config.Tensor(numerics=numerics.IntSymmetric(bits=4))
    >>> q = aqtlite.quantize(jnp.ones((3, 2)), int4, axes=1)
    >>> moves = [checkpoint.Move(sources="fc.weight", targets="fc/kernel", axes=(1, 0))]
    >>> shapes = {"fc": {"kernel": jax.ShapeDtypeStruct((2, 3), "float32")}}
    >>> weights = checkpoint.move_weights({"fc.weight": q}, moves, shapes)
    >>> fill(shapes, weights)
    {'fc': {'kernel': QTensor(int4[2,3], scale=float32[1,3], ...)}}

    Args:
        variables: pytree of arrays or shapes: variables of a Linen model,
            ``nnx.state(model, nnx.Param)`` of NNX (for `nnx.update`), or parameters of
            a function.
        weights: weights by the paths of variables, each read once: the result of
            `move_weights`.

    Returns:
        A tree like `variables`; floats in the dtypes of its leaves.

    Raises:
        CheckpointError: if a variable has no weight or one of another shape, or a
            weight no variable.
    """
    names = names_of(variables)
    unknown = sorted(set(weights) - set(names.values()))
    if unknown:
        raise CheckpointError(f"{unknown[0]} is no variable of the model")

    def value(path: Any, leaf: Any) -> Any:
        name = names[path_name(path)]
        if name not in weights:
            raise CheckpointError(f"the variable {name} has no weight")
        x = weights[name]
        if x.shape != leaf.shape:
            raise CheckpointError(
                f"{name} has the shape {x.shape}, and the variable {leaf.shape}"
            )
        if isinstance(x, QTensor):
            return jax.tree.map(jnp.asarray, x).astype(leaf.dtype)
        return jnp.asarray(np.asarray(x), leaf.dtype)

    return jax.tree.map_with_path(value, variables)


def names_of(variables: Any) -> dict[str, str]:
    """Returns the path of each variable by that of its leaf in a tree.

    They differ where a box of sharding metadata, or an `nnx.Variable`, is around it.

    Args:
        variables: pytree of arrays or shapes.
    """
    names = {}
    for path, node in jax.tree.leaves_with_path(variables, is_leaf=_is_box):
        for below, _ in jax.tree.leaves_with_path(node):
            leaf = path_name((*path, *below))
            names[leaf] = "/".join(steps_of(path_name(path)))
    return names


def _is_box(x: Any) -> bool:
    return nn.meta.is_axis_metadata(x) or isinstance(x, nnx.Variable)
