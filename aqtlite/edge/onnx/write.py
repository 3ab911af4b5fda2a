"""Writing of a deployed program to the bytes of an ONNX file."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from aqtlite.edge.deployed import Deployed
from aqtlite.edge.graph import Node
from aqtlite.edge.grid import Grid, Quantized
from aqtlite.edge.onnx import equations, forms, images
from aqtlite.edge.onnx.call import Call
from aqtlite.edge.onnx.writer import Array, NotWritable, Writer
from aqtlite.edge.operators.base import Equation
from aqtlite.edge.operators.contractions import Conv2D, Weighted
from aqtlite.edge.report import Processors

_LARGEST_INT8: dict[Processors, int] = {"any": 64, "vnni": 128}
"""Largest magnitude of an int8 weight. On x86-64 without VNNI, onnxruntime adds two
products of uint8 and int8 in 16 bits, and ``2 * 255 * 64`` still fits."""


def write(
    deployed: Deployed,
    grid_of: Callable[[int], Grid | None],
    input_names: Sequence[str],
    output_names: Sequence[str],
    processors: Processors,
) -> bytes:
    """Returns the bytes of an ONNX file.

    Args:
        deployed: the program.
        grid_of: function that returns the grid of an input or output in the file; None
            if it is float32.
        input_names: names of the inputs in the file.
        output_names: names of the outputs in the file.
        processors: where the results have to be right.

    Raises:
        ModuleNotFoundError: if the package onnx is not installed.
        ValueError: if operators have no form in ONNX; the message names all of them.
    """
    writing = _Writing(deployed, Writer(_LARGEST_INT8[processors]))
    graph = deployed.program.graph
    inputs = [
        writing.take(value, name, grid_of(value))
        for value, name in zip(graph.inputs, input_names, strict=True)
    ]
    writing.run()
    outputs = [
        writing.give(value, name, grid_of(value))
        for value, name in zip(graph.outputs, output_names, strict=True)
    ]
    return writing.writer.finish("main", inputs, outputs)


@dataclasses.dataclass
class _Writing:
    """The state of writing a program to a graph."""

    deployed: Deployed
    writer: Writer

    def __post_init__(self) -> None:
        self.arrays: dict[int, Array] = {}

    def take(self, value: int, name: str, in_file: Grid | None) -> Array:
        """Adds an input with its grid in the file; returns it."""
        aval = self.deployed.program.graph.values[value]
        grid, writer = self.deployed.grids.get(value), self.writer
        dtype, shape = np.dtype(aval.dtype), aval.shape
        given = Array(writer.name(name), shape, dtype, in_file)
        self.arrays[value] = given
        if in_file is not None and in_file.dtype == "uint8":
            # As activations are stored: the integers are used as they are.
            self.arrays[value] = Array(given.name, shape, dtype, grid)
            return given
        if in_file is not None:
            floats = writer.interface("DequantizeLinear", given.name, in_file)
            self.arrays[value] = Array(floats, shape, dtype)
        if grid is not None and value not in self.deployed.program.unrounded:
            floats = self.arrays[value].name
            self.arrays[value] = writer.quantize(
                floats, shape, grid, f"{name}/quantized"
            )
        elif in_file is not None:
            # Otherwise onnxruntime moves an operator of layout in front of the
            # DequantizeLinear, and gives the integers in between two dtypes.
            self.arrays[value] = writer.barrier(self.arrays[value], f"{name}/input")
        return given

    def give(self, value: int, name: str, in_file: Grid | None) -> Array:
        """Adds an output with its grid in the file; returns it."""
        x, writer = self.read(value), self.writer
        if in_file is None:
            made = writer.node("Identity", [writer.floats(x)], name)
            return Array(made, x.shape, x.dtype)
        if in_file.dtype == "uint8":
            made = writer.node("Identity", [self.rounded(x, in_file, name).name], name)
        else:
            made = writer.interface("QuantizeLinear", writer.floats(x), in_file, name)
        return Array(made, x.shape, x.dtype, in_file)

    def read(self, value: int) -> Array:
        """The array of a value; adds it as a constant if it is known."""
        if value not in self.arrays:
            known = np.asarray(self.deployed.known[value])
            self.arrays[value] = self.writer.constant(known)
        return self.arrays[value]

    def rounded(self, x: Array, grid: Grid, name: str) -> Array:
        """Quantizes an array, unless it is quantized already."""
        if x.grid is not None:
            return x
        return self.writer.quantize(x.name, x.shape, grid, f"{name}/quantized")

    def run(self) -> None:
        """Adds all nodes of the program.

        Raises:
            ValueError: if some nodes have no form in ONNX.
        """
        program, refused = self.deployed.program, []
        for node in program.graph.nodes:
            if all(value in self.deployed.known for value in node.outputs):
                continue
            try:
                self._add(node)
            except NotWritable as error:
                name = node.operator.name_in_rules
                refused.append(f"{node.place}: {name}: {error}")
                for value in node.outputs:
                    aval = program.graph.values[value]
                    dtype = np.dtype(aval.dtype)
                    self.arrays[value] = Array("refused", aval.shape, dtype)
        if refused:
            raise ValueError(
                "these operations cannot be written into an ONNX file; leave them out "
                "of what is exported, or export to LiteRT (a path that ends in "
                ".tflite):\n  " + "\n  ".join(refused)
            )

    def _add(self, node: Node) -> None:
        deployed = self.deployed
        if isinstance(node.operator, Equation):
            inputs = [self.read(i) for i in node.inputs]
            graph = deployed.program.graph
            weight = deployed.operands.get(node.outputs[0], {}).get(1)
            made = equations.write(
                self.writer, graph, deployed.known, node, inputs, weight
            )
            self.arrays.update(zip(node.outputs, made, strict=True))
            return
        name = deployed.program.names[node.output]
        grid = weight = None
        if deployed.program.is_quantized(node):
            grid = deployed.grids[node.output]
            inputs = self._quantized_inputs(node, name)
        else:
            weight = deployed.operands.get(node.output, {}).get(1)
            floats = [i for n, i in enumerate(node.inputs) if n != 1 or weight is None]
            inputs = [self.writer.in_floats(self.read(i)) for i in floats]
        aval = deployed.program.graph.values[node.output]
        call = Call(
            self.writer,
            inputs,
            aval.shape,
            np.dtype(aval.dtype),
            name,
            grid,
            None if weight is None else Quantized(*layout_of(node, 1, weight)),
            node.output in deployed.dynamic,
        )
        self.arrays[node.output] = forms.write(call, node.operator)

    def _quantized_inputs(self, node: Node, name: str) -> list[Array]:
        deployed, inputs = self.deployed, []
        stored = deployed.operands[node.output]
        for position, value in enumerate(node.inputs):
            if position in stored:
                inputs.append(self._stored(node, position, stored[position], name))
                continue
            x = self.read(value)
            if value in deployed.grids:
                x = self.rounded(x, deployed.grids[value], name)
            inputs.append(x)
        return inputs

    def _stored(self, node: Node, position: int, one: Quantized, name: str) -> Array:
        is_weighted = isinstance(node.operator, Weighted)
        what = ("", "weight", "bias")[position] if is_weighted else f"operand{position}"
        if one.grid.dtype == "int2":
            raise NotWritable(
                "its weight is of int2, and onnxruntime takes none: let edge.Rule have "
                'weights="int4" or "int8"'
            )
        qvalue, grid = layout_of(node, position, one)
        return self.writer.stored(qvalue, grid, f"{name}/{what}")


def layout_of(node: Node, position: int, one: Quantized) -> tuple[np.ndarray, Grid]:
    """Integers and grid of a known operand, with axes in ONNX's order."""
    qvalue, grid = np.asarray(one.qvalue), one.grid
    if position == 1 and isinstance(node.operator, Equation):
        return images.transposed_layout(node.operator, one)
    if position != 1 or not isinstance(node.operator, Conv2D):
        return qvalue, grid
    order = (3, 2, 0, 1)
    qvalue = qvalue.transpose(order)
    if grid.axis is None:
        return qvalue, grid
    axis = order.index(grid.axis)
    if grid.block is None:
        return qvalue, dataclasses.replace(grid, axis=axis)
    scale, zero_point = (
        np.transpose(x, order) if np.ndim(x) else x
        for x in (grid.scale, grid.zero_point)
    )
    return qvalue, Grid(scale, zero_point, grid.dtype, axis, grid.block)
