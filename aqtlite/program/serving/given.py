"""Parameters given as `QTensor`s: their integers become frozen weights as they are."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from aqtlite.program.serving.framework import KeyPath
from aqtlite.program.serving.integers import handed_over
from aqtlite.program.serving.weight import Weight
from aqtlite.qtensor.qtensor import QTensor

KEPT, ROUNDED_AGAIN = "integers as given", "rounded again"
"""What became of given integers, in reports."""


def split(params: Any) -> tuple[Any, dict[KeyPath, QTensor]]:
    """Takes the quantized parameters out of a tree.

    Args:
        params: pytree of arrays and `QTensor`s.

    Returns:
        The tree with the shapes of float arrays in place of the `QTensor`s, and these
        by their paths.

    Raises:
        ValueError: if the arrays of one are traced, or only shapes.
    """
    found: dict[KeyPath, QTensor] = {}

    def shape_of(path: KeyPath, node: Any) -> Any:
        if not isinstance(node, QTensor):
            return node
        for array in jax.tree.leaves(node):
            if isinstance(array, jax.ShapeDtypeStruct | jax.core.Tracer):
                raise ValueError(
                    f"the parameter {jax.tree_util.keystr(path)} is a QTensor without "
                    "values: convert it outside of jax.jit and jax.eval_shape, or give "
                    "its shape, jax.ShapeDtypeStruct(q.shape, q.dtype)"
                )
        found[path] = node
        return jax.ShapeDtypeStruct(node.shape, node.dtype)

    shapes = jax.tree.map_with_path(shape_of, params, is_leaf=_is_quantized)
    return shapes, found


def kept(
    weight: Weight,
    given: Mapping[Any, QTensor],
    wanted: QTensor,
    prepared: Callable[..., Any],
) -> QTensor | None:
    """Returns a weight with given integers; None if it has to be rounded.

    Args:
        weight: the weight.
        given: quantized parameters.
        wanted: the weight that its config makes, with shapes in place of arrays.
        prepared: function from the weight's inputs to the array that is quantized.
    """
    is_whole = all(one in given for one in weight.inputs)
    if not is_whole or weight.made.damping is not None:
        return None
    return handed_over(wanted, [given[one] for one in weight.inputs], prepared)


def _is_quantized(x: Any) -> bool:
    return isinstance(x, QTensor)
