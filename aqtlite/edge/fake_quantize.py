"""Quantization-aware training: floats, rounded where integers will be."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite.edge import grids as grids_lib
from aqtlite.edge import program as program_lib
from aqtlite.edge import stored
from aqtlite.edge.graph import Node
from aqtlite.edge.grid import Grid
from aqtlite.edge.program import Program
from aqtlite.edge.ranges import Ranges
from aqtlite.edge.rules import Rule


@dataclasses.dataclass(frozen=True, eq=False)
class FakeQuantized:
    """A model that rounds as its full-integer program does.

    Values are rounded to integers and scaled back, in float arithmetic. Gradients pass
    by straight-through estimators (Bengio et al. 2013, arXiv:1308.3432), and are zero
    where a value is clipped.
    """

    model: Any
    ranges: Ranges
    rules: Sequence[Rule]

    def __call__(self, variables: Any, *args: Any) -> Any:
        program = program_lib.make(self.model, variables, args, self.rules)
        grids = grids_lib.resolve(program, self.ranges)
        values = program.bind(variables, args)
        for number in program.graph.inputs:
            if number in grids:
                values[number] = rounded(values[number], grids[number])

        def run(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
            return _run(program, grids, node, inputs)

        return program.result(program.graph.evaluate(values, run))


def fake_quantize(
    model: Any, ranges: Ranges, rules: Sequence[Rule] = ()
) -> FakeQuantized:
    """Returns a function of variables and arguments that rounds as integers will.

    It is for quantization-aware training, and for a look at the accuracy that a file
    will have. Weights are quantized anew at each call; the ranges of activations stay.

    Args:
        model: a Linen module, an NNX module, or a function of variables and arguments.
        ranges: ranges of the model's values, as `calibrate` finds them.
        rules: which integers.

    >>> import flax.linen as nn
    >>> from aqtlite import edge
    >>> model, x = nn.Dense(3), jnp.linspace(-1, 1, 8).reshape(2, 4)
    >>> variables = model.init(jax.random.key(0), x)
    >>> ranges = edge.calibrate(model, variables, [x])
    >>> rounded_model = edge.fake_quantize(model, ranges)
    >>> error = rounded_model(variables, x) - model.apply(variables, x)
    >>> bool(abs(error).max() < 0.05)
    True
    >>> gradient = jax.grad(lambda v: rounded_model(v, x).sum())(variables)
    """
    return FakeQuantized(model, ranges, tuple(rules))


def _run(
    program: Program, grids: Mapping[int, Grid], node: Node, inputs: Sequence[Any]
) -> Sequence[Any]:
    if not program.is_quantized(node):
        return node.compute(inputs)
    known = dict(zip(node.inputs, inputs, strict=True))
    inputs = [
        rounded(known[i], grids[i]) if i in program.unrounded else known[i]
        for i in node.inputs
    ]
    for position, one in stored.operands(program, node, known, grids).items():
        inputs[position] = _straight_through(inputs[position], one.dequant())
    (y,) = node.compute(inputs)
    return [rounded(y, grids[node.output]) if node.output in grids else y]


def rounded(x: jax.Array, grid: Grid) -> jax.Array:
    """Rounds values to a grid; gradients pass where they are not clipped."""
    clipped = jnp.clip(x, *grid.ends)
    return _straight_through(clipped, stored.in_grid(x, grid).dequant())


def _straight_through(x: jax.Array, value: jax.Array) -> jax.Array:
    """A value whose gradient is that of x."""
    # Zero is added, so that the value has no other bits.
    return lax.stop_gradient(value) + (x - lax.stop_gradient(x))
