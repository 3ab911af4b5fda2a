"""Quantization-aware training for full-integer programs, by fake quantization."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite.edge import grids as grids_lib
from aqtlite.edge import program as program_lib
from aqtlite.edge.arithmetic import rescaling
from aqtlite.edge.arithmetic.kernels import Kernels, check_kernels
from aqtlite.edge.deployed import in_grid, known_operands
from aqtlite.edge.graph import Node
from aqtlite.edge.grid import Grid, Quantized
from aqtlite.edge.program import Program
from aqtlite.edge.ranges import Ranges
from aqtlite.edge.rules import Rule
from aqtlite.edge.simulate import integers
from aqtlite.lowering import fusion


@dataclasses.dataclass(frozen=True, eq=False)
class FakeQuantized:
    """A model that computes the dequantized values of its full-integer program.

    Gradients are those of the straight-through estimator (Bengio et al. 2013,
    arXiv:1308.3432), and zero where a value is clipped.
    """

    model: Any
    ranges: Ranges
    rules: Sequence[Rule]
    kernels: Kernels | None = "xnnpack"

    def __call__(self, variables: Any, *args: Any) -> Any:
        program = program_lib.make(self.model, variables, args, self.rules)
        grids = grids_lib.resolve(program, self.ranges)
        values = program.bind(variables, args)
        for number in program.graph.inputs:
            if number in grids:
                values[number] = self._rounded(values[number], grids[number])

        def run(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
            if program.static.issuperset(node.outputs):
                return [_as_alone(x) for x in node.compute(inputs)]
            if not program.is_quantized(node):
                return node.compute(inputs)
            return [self._run(program, grids, node, inputs)]

        return program.result(program.graph.evaluate(values, run))

    def _run(
        self,
        program: Program,
        grids: Mapping[int, Grid],
        node: Node,
        inputs: Sequence[Any],
    ) -> Any:
        known = dict(zip(node.inputs, inputs, strict=True))
        inputs = [
            self._rounded(known[i], grids[i]) if i in program.unrounded else known[i]
            for i in node.inputs
        ]
        operands = known_operands(program, node, lax.stop_gradient(known), grids)
        for position, one in operands.items():
            inputs[position] = _straight_through(inputs[position], one.dequant())
        (y,) = node.compute(inputs)
        if node.output not in grids:
            return y
        grid = grids[node.output]
        if self.kernels is None:
            return self._rounded(y, grid)
        q = integers(node, lax.stop_gradient(inputs), operands, grids, self.kernels)
        return _straight_through(_clipped(y, grid), Quantized(q, grid).dequant())

    def _rounded(self, x: jax.Array, grid: Grid) -> jax.Array:
        """Rounds values to a grid; gradients pass through unless values are clipped."""
        if self.kernels is None:
            value = in_grid(x, grid).dequant()
        else:
            q = rescaling.quantize(x, grid, self.kernels)
            value = Quantized(q, grid).dequant()
        return _straight_through(_clipped(x, grid), value)


def fake_quantize(
    model: Any,
    ranges: Ranges,
    rules: Sequence[Rule] = (),
    *,
    kernels: Kernels | None = "xnnpack",
) -> FakeQuantized:
    """Makes a function of variables and arguments that rounds like an exported file.

    Use it for quantization-aware training, or to estimate the accuracy of a file.
    Weights are quantized at each call; the ranges of activations are fixed.

    Args:
        model: a Linen module, an NNX module, or a function of variables and arguments.
        ranges: ranges of the model's values, from `calibrate`.
        rules: rules that select the integers of each operator.
        kernels: LiteRT kernels to reproduce bit for bit, as for `simulate`. None rounds
            floats to nearest instead, which is closest to onnxruntime.

    Raises:
        ValueError: if `kernels` is not one of these.

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
    if kernels is not None:
        check_kernels(kernels)
    return FakeQuantized(model, ranges, tuple(rules), kernels)


def _as_alone(x: Any) -> Any:
    """Keeps a known vector's computation from being fused with others.

    Biases and factors of channels are sums of products, which LLVM would contract to
    fused multiply-adds, with other bits.
    """
    if jnp.ndim(x) > 1 or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        return x
    return _straight_through(x, fusion.barrier(lax.stop_gradient(x)))


def _clipped(x: jax.Array, grid: Grid) -> jax.Array:
    return jnp.clip(x, *grid.ends)


def _straight_through(x: jax.Array, value: jax.Array) -> jax.Array:
    """Returns `value`, with the gradient of x (straight-through estimator)."""
    # The second summand is zero, so the bits of the value do not change.
    return lax.stop_gradient(value) + (x - lax.stop_gradient(x))
