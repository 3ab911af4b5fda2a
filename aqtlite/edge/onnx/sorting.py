"""The ONNX forms of sorts left in float."""

from collections.abc import Sequence

import numpy as np

from aqtlite.edge.onnx.writer import Array, NotWritable, Writer
from aqtlite.edge.operators import sorts
from aqtlite.edge.operators.base import Equation

_SORTED = ("float32", "int32", "int64")
"""Dtypes of onnxruntime's TopK."""


def write(
    writer: Writer, equation: Equation, inputs: Sequence[Array], name: str
) -> list[Array]:
    """Adds a `sort` or `top_k` to a graph; returns its outputs.

    Args:
        writer: writer of the graph.
        equation: the equation.
        inputs: inputs of the equation.
        name: name of the outputs.

    Raises:
        NotWritable: if it sorts by several keys, or a dtype that TopK does not.
    """
    params, (key, *others) = equation.params, inputs
    if sorts.has_several_keys(equation):
        raise NotWritable(sorts.SEVERAL_KEYS)
    if np.dtype(key.dtype).name not in _SORTED:
        raise NotWritable(f"it sorts {np.dtype(key.dtype).name}")
    is_sort = equation.primitive == "sort"
    axis = params["dimension" if is_sort else "axis"]
    count = key.shape[axis] if is_sort else params["k"]
    values, places = writer.node_of_several(
        "TopK",
        [key.name, writer.indices([count])],
        [name, f"{name}/places"],
        axis=axis,
        largest=0 if is_sort else 1,
    )
    shape = (*key.shape[:axis], count, *key.shape[axis + 1 :])
    found = [Array(values, shape, key.dtype)]
    if not is_sort:
        of_int64 = Array(places, shape, np.dtype(np.int64))
        dtype = equation.eqn.outvars[1].aval.dtype
        return [*found, writer.cast(of_int64, dtype, f"{name}/indices")]
    for x in others:
        made = writer.node("GatherElements", [x.name, places], name, axis=axis)
        found.append(Array(made, shape, x.dtype))
    return found
