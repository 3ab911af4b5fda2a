"""Simulation of an exported file's interpreter in JAX."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from aqtlite.edge.arithmetic import rescaling
from aqtlite.edge.arithmetic.kernels import Kernels, check_kernels
from aqtlite.edge.deployed import Deployed, deploy
from aqtlite.edge.graph import Node
from aqtlite.edge.grid import Grid, Quantized
from aqtlite.edge.ranges import Ranges
from aqtlite.edge.rules import Rule


@dataclasses.dataclass(frozen=True, eq=False)
class Simulation:
    """A full-integer program as a JAX function of its file's inputs."""

    deployed: Deployed
    kernels: Kernels

    def __call__(self, *args: Any) -> Any:
        """Computes the outputs of the file: integers, or floats if left in float.

        Args:
            *args: inputs of the model. Floats are quantized to the grid of the input;
                integers of the grid's dtype are used directly.
        """
        return self.deployed.program.result(self._run(args))

    def values(self, *args: Any) -> dict[str, jax.Array]:
        """Computes the integers of all values, by name.

        Args:
            *args: inputs of the model, as for a call.
        """
        known, program = self._run(args), self.deployed.program
        return {
            name: known[value]
            for value, name in program.names.items()
            if value in self.deployed.grids
        }

    def dequantize(self, name: str, integers: Any) -> jax.Array:
        """Dequantizes the integers of a value.

        Args:
            name: name of the value, a key of `values`.
            integers: integers of the value.

        Raises:
            KeyError: if there is no value of that name.
        """
        numbers = {n: value for value, n in self.deployed.program.names.items()}
        grid = self.deployed.grids[numbers[name]]
        return Quantized(integers, grid).dequant()

    def _run(self, args: tuple[Any, ...]) -> dict[int, Any]:
        deployed, graph = self.deployed, self.deployed.program.graph
        leaves = jax.tree.leaves(args)
        if len(leaves) != len(graph.inputs):
            raise ValueError(
                f"the simulation takes {len(graph.inputs)} arrays, as the sample "
                f"arguments had, got {len(leaves)}"
            )
        values = dict(deployed.known)
        for number, x in zip(graph.inputs, leaves, strict=True):
            grid, x = deployed.grids.get(number), jnp.asarray(x)
            if grid is not None and x.dtype != jnp.dtype(grid.dtype):
                x = rescaling.quantize(x, grid, self.kernels)
            if grid is not None and number in deployed.program.unrounded:
                x = Quantized(x, grid).dequant()
            values[number] = x

        def run(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
            return _run(deployed, node, inputs, self.kernels)

        known = graph.evaluate(values, run)
        for value in deployed.program.unrounded.intersection(graph.outputs):
            if value in deployed.grids:
                known[value] = rescaling.quantize(known[value], deployed.grids[value])
        return known


def simulate(
    model: Any,
    variables: Any,
    ranges: Ranges,
    sample_args: Any,
    rules: Sequence[Rule] = (),
    *,
    kernels: Kernels = "xnnpack",
) -> Simulation:
    """Makes a JAX function that computes what an exported file computes.

    Every operator gives the integers of LiteRT's kernels, rounded as they round.

    Args:
        model: a Linen module, an NNX module, or a function of variables and arguments.
        variables: variables of the model.
        ranges: ranges of the model's values, from `calibrate`.
        sample_args: arguments of the model, a tuple or a single one, or their shapes.
        rules: rules that select the integers of each operator.
        kernels: LiteRT kernels to simulate: "xnnpack", the default of LiteRT;
            "builtin", its kernels without XNNPACK; or "reference".

    Raises:
        TypeError: if an argument is of the wrong type.
        ValueError: if `kernels` is none of these, if an operation has no integer form,
            or if ranges are missing.

    >>> import flax.linen as nn
    >>> from aqtlite import edge
    >>> model, x = nn.Dense(3), jnp.linspace(-1, 1, 8).reshape(2, 4)
    >>> variables = model.init(jax.random.key(0), x)
    >>> ranges = edge.calibrate(model, variables, [x])
    >>> simulation = edge.simulate(model, variables, ranges, x)
    >>> simulation(x).dtype
    dtype('int8')
    """
    check_kernels(kernels)
    args = sample_args if isinstance(sample_args, tuple) else (sample_args,)
    return Simulation(deploy(model, variables, ranges, args, rules), kernels)


def _run(
    deployed: Deployed, node: Node, inputs: Sequence[Any], kernels: Kernels
) -> Sequence[Any]:
    program, grids = deployed.program, deployed.grids
    if not program.is_quantized(node):
        return node.compute(_floats(deployed, node, inputs))
    operands = deployed.operands[node.output]
    return [integers(node, inputs, operands, grids, kernels)]


def _floats(deployed: Deployed, node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Dequantized inputs of an operator that stays in float."""
    return [
        Quantized(x, deployed.grids[i]).dequant()
        if i in deployed.grids
        and i not in deployed.program.unrounded
        and i not in deployed.known
        else x
        for i, x in zip(node.inputs, inputs, strict=True)
    ]


def integers(
    node: Node,
    inputs: Sequence[Any],
    operands: Mapping[int, Quantized],
    grids: Mapping[int, Grid],
    kernels: Kernels,
) -> jax.Array:
    """Computes the integers of an operator's output.

    Args:
        node: the operator.
        inputs: integers, floats to quantize, or arrays without a grid.
        operands: quantized known operands, by position.
        grids: grids of the computed values, by number.
        kernels: LiteRT kernels to simulate.
    """
    taken: list[Any] = []
    for position, (value, x) in enumerate(zip(node.inputs, inputs, strict=True)):
        grid = grids.get(value)
        if position in operands:
            one = operands[position]
            taken.append(Quantized(jnp.asarray(one.qvalue, _dtype(one.grid)), one.grid))
        elif grid is None:
            taken.append(x)
        else:
            is_float = jnp.issubdtype(x.dtype, jnp.floating)
            x = rescaling.quantize(x, grid, kernels) if is_float else x
            taken.append(Quantized(x, grid))
    # Only the inputs of a comparison have grids.
    of_inputs = [x.grid for x in taken if isinstance(x, Quantized)]
    output = grids.get(node.output) or of_inputs[0]
    return node.operator.simulate(output, kernels, *taken)


def _dtype(grid: Grid) -> str:
    """Dtype that holds the integers of a grid: int8 also for narrower integers."""
    return "int8" if grid.dtype in ("int2", "int4") else grid.dtype
