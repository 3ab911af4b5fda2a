"""The variables of a Linen model as the leaves that a conversion knows."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from aqtlite.program.serving.model import Buffer, Parameter
from aqtlite.shapes.sharding import explicit_spec


def parameters_of(params: Any) -> tuple[Parameter, ...]:
    """Returns the leaves of the parameters, boxed or not."""
    nodes = jax.tree_util.tree_flatten_with_path(
        params, is_leaf=nn.meta.is_axis_metadata
    )[0]
    paths = [
        (path, (*path, *below), leaf)
        for path, node in nodes
        for below, leaf in jax.tree_util.tree_flatten_with_path(node)[0]
    ]
    return tuple(
        Parameter(
            number=number,
            path=tuple(str(getattr(key, "key", key)) for key in path),
            key_path=key_path,
            shape=tuple(leaf.shape),
            dtype=np.dtype(leaf.dtype),
            spec=explicit_spec(leaf),
        )
        for number, (path, key_path, leaf) in enumerate(paths)
    )


def buffers_of(variables: Mapping[str, Any]) -> dict[Buffer, Any]:
    """Returns the leaves of variables other than "params"."""
    others = {k: v for k, v in variables.items() if k != "params"}
    found = jax.tree_util.tree_flatten_with_path(others, is_leaf=_is_none)[0]
    return {Buffer(i, key_path): leaf for i, (key_path, leaf) in enumerate(found)}


def _is_none(x: Any) -> bool:
    return x is None
