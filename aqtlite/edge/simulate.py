"""Simulation: what the interpreter of an exported file computes, in JAX."""

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
    """A full-integer program, as a function of the inputs of its file."""

    deployed: Deployed
    kernels: Kernels

    def __call__(self, *args: Any) -> Any:
        """The outputs of the file: integers, where the program has them.

        Args:
            *args: inputs of the model. Floats are rounded to the integers of the input;
                integers of the grid's dtype are taken as they are.
        """
        return self.deployed.program.result(self._run(args))

    def values(self, *args: Any) -> dict[str, jax.Array]:
        """All integers that are computed, by the name of their value.

        Args:
            *args: as for a call.
        """
        known, program = self._run(args), self.deployed.program
        return {
            name: known[value]
            for value, name in program.names.items()
            if value in self.deployed.grids
        }

    def dequantize(self, name: str, integers: Any) -> jax.Array:
        """The floats that the integers of a value stand for.

        Args:
            name: name of the value, as `values` has it.
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
    """Returns what an exported file computes, as a function in JAX.

    Every operator computes the integers that LiteRT's kernels compute, with their
    roundings.

    Args:
        model: a Linen module, an NNX module, or a function of variables and arguments.
        variables: variables of the model.
        ranges: ranges of the model's values, as `calibrate` finds them.
        sample_args: arguments of the model, a tuple or a single one; shapes will do.
        rules: integers of each operator.
        kernels: whose roundings: "xnnpack", which LiteRT uses by default, "builtin",
            without it, or "reference".

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if `kernels` is another word, if an operation has no integer form,
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
    """Inputs of an operator of floats."""
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
    """The integers of an operator's output.

    Args:
        node: the operator.
        inputs: integers, floats to be rounded, or what has no grid.
        operands: known operands, by position.
        grids: grids of the values that are computed.
        kernels: whose arithmetic.
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
    # A comparison has integers as its inputs alone.
    of_inputs = [x.grid for x in taken if isinstance(x, Quantized)]
    output = grids.get(node.output) or of_inputs[0]
    return node.operator.simulate(output, kernels, *taken)


def _dtype(grid: Grid) -> str:
    """The dtype in which the integers of a grid are held: int8 for narrower ones."""
    return "int8" if grid.dtype in ("int2", "int4") else grid.dtype
