"""Annotation of a program's integers, by StableHLO composites that converters read.

``quant.fake_quant`` marks a value with its scale, zero point and dtype; an operator
with marks at all inputs and outputs is converted to integers. ``quant.dequantize`` and
``quant.quantize`` turn inputs and outputs of the program into integers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.edge.deployed import Deployed
from aqtlite.edge.graph import Node
from aqtlite.edge.grid import Grid
from aqtlite.edge.litert import floats, transposed
from aqtlite.edge.operators.arithmetic import Multiply
from aqtlite.edge.operators.base import Operator
from aqtlite.edge.operators.contractions import Conv2D
from aqtlite.edge.operators.reductions import AveragePool2D

_NAMES = {"int2": "i2", "int4": "i4", "int8": "i8", "int16": "i16", "uint8": "ui8"}


def annotated(
    deployed: Deployed, grid_of: Callable[[int], Grid | None]
) -> Callable[..., list[Any]]:
    """Makes a program with annotated integers, as a function of its inputs.

    Args:
        deployed: the program.
        grid_of: function that returns the grid of an input or output in the file; None
            if it is float32.
    """
    graph, grids = deployed.program.graph, deployed.grids
    unrounded = deployed.program.unrounded

    def function(*inputs: Any) -> list[Any]:
        values = dict(deployed.known)
        for number, x in zip(graph.inputs, inputs, strict=True):
            given = grid_of(number)
            if given is not None:
                x = _dequantize(x, given)
            is_rounded = given is None or given.dtype != grids[number].dtype
            if is_rounded and number in grids and number not in unrounded:
                x = mark(x, grids[number])
            values[number] = x

        def run(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
            return _run(deployed, node, inputs)

        known = graph.evaluate(values, run)
        outputs = []
        for i in graph.outputs:
            x, given = known[i], grid_of(i)
            if given is not None and i in unrounded:
                x = mark(x, grids[i])
            outputs.append(x if given is None else _rounded(x, grids[i], given))
        return outputs

    return function


def _run(deployed: Deployed, node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    program, grids = deployed.program, deployed.grids
    if not grids:
        return _run_in_float(deployed, node, inputs)
    if not program.is_quantized(node):
        # Without barriers, the converter would quantize it if its neighbours are.
        inputs = [
            x if i in deployed.known else lax.optimization_barrier(x)
            for i, x in zip(node.inputs, inputs, strict=True)
        ]
        outputs = floats.compute(node, floats.operands(node.operator, inputs))
        return [lax.optimization_barrier(y) for y in outputs]
    inputs = [
        mark(x, grids[i]) if i in program.unrounded else x
        for i, x in zip(node.inputs, inputs, strict=True)
    ]
    if node.operator.is_compound:
        # A mark of its own prevents common subexpression elimination with other
        # operators, after which the converter would not recognise this one.
        inputs[0] = mark(inputs[0], grids[node.inputs[0]], node.output)
    for position, one in deployed.operands[node.output].items():
        value = one.dequant()
        # A bias needs no mark: its values are already on the grid of the sums.
        inputs[position] = value if one.grid.dtype == "int32" else mark(value, one.grid)
    (y,) = node.compute(inputs)
    return [mark(y, grids[node.output]) if node.output in grids else y]


def _run_in_float(
    deployed: Deployed, node: Node, inputs: Sequence[Any]
) -> Sequence[Any]:
    """Computes an operator of a program in float, with its frozen weight if any."""
    operator = node.operator
    given = floats.operands(operator, inputs)
    is_known = not deployed.known.keys().isdisjoint(node.inputs)
    if isinstance(operator, Multiply) and is_known and any(deployed.operands.values()):
        # The converter would fold a known factor into the integers of a weight.
        given = [lax.optimization_barrier(x) for x in given]
    if isinstance(operator, AveragePool2D):
        # Between two transpositions, the converter would drop the second.
        given = [lax.optimization_barrier(x) for x in given]
    for position, one in deployed.operands.get(node.outputs[0], {}).items():
        value = transposed.dilated(operator, position, one.dequant())
        is_marked = transposed.takes_frozen(operator)
        given[position] = mark(value, one.grid) if is_marked else value
        if node.output in deployed.dynamic and (
            one.grid.dtype == "int8" or not _may_be_depthwise(operator, given[0])
        ):
            given[0] = lax.composite(lambda x, **_: x, name="quant.fake_quant")(
                given[0], **_OWN_RANGE
            )
    return floats.compute(node, given)


def _may_be_depthwise(operator: Operator, x: jax.Array) -> bool:
    """Whether LiteRT runs an operator in kernels without dynamic ranges for int4.

    Those are of grouped convolutions; one of a single channel counts as depthwise.
    """
    return isinstance(operator, Conv2D) and (operator.groups > 1 or x.shape[-1] == 1)


_OWN_RANGE = {
    "scale": np.zeros(0, np.float32),
    "dtype": "i8",
    "narrow_range": False,
}
"""Attributes of activations that LiteRT quantizes by their own range at each call."""


def mark(x: jax.Array, grid: Grid, user: int | None = None) -> jax.Array:
    """Marks a float value with its grid.

    Args:
        x: the value.
        grid: grid of the value.
        user: output of the only operator that uses the mark; None for any operator.
    """
    attributes = _attributes(grid)
    if user is not None:
        attributes["user"] = user
    if grid.axis is not None:
        attributes["quantization_dimension"] = grid.axis
    return lax.composite(lambda x, **_: x, name="quant.fake_quant")(x, **attributes)


def _attributes(grid: Grid) -> dict[str, Any]:
    return {
        "scale": np.asarray(grid.scale, np.float32).reshape(-1),
        "zero_point": np.full(np.size(grid.scale), grid.zero_point, np.int64),
        "dtype": _NAMES[grid.dtype],
        "narrow_range": False,
    }


def _dequantize(q: jax.Array, grid: Grid) -> jax.Array:
    """Dequantizes an integer input of the program."""
    composite = lax.composite(
        lambda q, **_: q.astype(jnp.float32), name="quant.dequantize"
    )
    return composite(q, **_attributes(grid))


def _rounded(x: jax.Array, grid: Grid, given: Grid) -> jax.Array:
    """Quantizes an output of the program, from its grid to that of the file."""
    q = _quantize(x, grid)
    if given.dtype == grid.dtype:
        return q
    # Without the barrier, the operator before would give the integers of the file, and
    # the kernels of most operators compute wrongly then.
    return _quantize(_dequantize(lax.optimization_barrier(q), grid), given)


def _quantize(x: jax.Array, grid: Grid) -> jax.Array:
    """Quantizes an output of the program."""
    dtype = jnp.dtype(grid.dtype)
    composite = lax.composite(lambda x, **_: x.astype(dtype), name="quant.quantize")
    return composite(x, **_attributes(grid))
