"""The nodes and arrays of serving variables, as a manifest lists them."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from aqtlite.checkpoint.arrays import ArrayInfo
from aqtlite.checkpoint.manifest import Frozen, Node, Plain, Stored
from aqtlite.checkpoint.names import path_name
from aqtlite.checkpoint.packing import packing_of
from aqtlite.flax.linen.frozen_kernel import FrozenKernel
from aqtlite.program.serving.frozen_record import FrozenRecord
from aqtlite.qtensor.qtensor import QTensor


def info_of(leaf: Any) -> ArrayInfo:
    """Shape and dtype of an array, or of a `jax.ShapeDtypeStruct`."""
    return ArrayInfo(tuple(leaf.shape), jnp.dtype(leaf.dtype))


def describe(serving: Any) -> tuple[dict[str, Node], dict[str, Stored]]:
    """Lists the nodes of serving variables, given as shapes, and their arrays."""
    nodes: dict[str, Node] = {}
    arrays: dict[str, Stored] = {}

    def is_node(x: Any) -> bool:
        return isinstance(x, QTensor | FrozenRecord) or nn.meta.is_axis_metadata(x)

    for key_path, node in jax.tree_util.tree_flatten_with_path(serving, is_node)[0]:
        path = path_name(key_path)
        if isinstance(node, FrozenRecord | FrozenKernel):
            nodes[path] = node
            continue
        named = {
            "/".join(filter(None, (path, path_name(below)))): info_of(leaf)
            for below, leaf in jax.tree_util.tree_flatten_with_path(node)[0]
        }
        arrays.update(
            {name: Stored(info, packing_of(info)) for name, info in named.items()}
        )
        if isinstance(node, QTensor):
            prefix = f"{path}/"
            # A box is a step of its own below the field.
            fields = {
                name.removeprefix(prefix).partition("/")[0]: name for name in named
            }
            qvalue = fields["qvalue"]
            arrays[qvalue] = Stored(
                named[qvalue], packing_of(named[qvalue], node.numerics)
            )
            nodes[path] = Frozen(
                qvalue,
                fields["scale"],
                fields.get("zero_point"),
                fields.get("sums"),
                jnp.dtype(node.dtype),
                node.order,
                node.numerics,
                origin={},
                padding=node.padding,
            )
        else:
            (name,) = named
            nodes[path] = Plain(name)
    return nodes, arrays
