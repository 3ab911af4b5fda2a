"""Tracing of functions to graphs: inlines calls, unrolls scans, folds constants."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from aqtlite.edge.graph import Builder, Graph, Node
from aqtlite.edge.operators.base import Equation
from aqtlite.jaxpr import equations, module_scopes, scopes, tracing
from aqtlite.program.modules import flax_models

_IDENTITIES = ("stop_gradient", "copy", "copy_p", "optimization_barrier", "name")
_CONTROL_FLOW = ("while", "cond")

OPERAND = "aqtlite_operand"
"""Name of the primitive that has an operator of a graph as parameter."""

_LARGEST_CONSTANT = 1 << 24  # Elements; larger results are not folded.


def trace(
    function: Callable[..., Any], variables: Any, args: tuple[Any, ...]
) -> tuple[Graph, tracing.Traced]:
    """Traces a function to a graph.

    Args:
        function: function of `variables` and `args`.
        variables: pytree of arrays or shapes.
        args: pytrees of arrays or shapes.

    Raises:
        ValueError: if the function has control flow that depends on data.
    """
    traced = flax_models.trace(function, (variables, *args))
    of_variables, *_ = traced.inputs
    is_parameter = {i for i in jax.tree.leaves(of_variables) if i is not None}
    builder = Builder()
    avals: list[Any] = list(traced.jaxpr.in_avals)
    numbers = [builder.value(x.shape, x.dtype) for x in avals]
    outputs = inline(builder, traced.jaxpr, numbers)
    graph = builder.finish(
        [n for i, n in enumerate(numbers) if i not in is_parameter],
        [n for i, n in enumerate(numbers) if i in is_parameter],
        outputs,
    )
    return graph, traced


def inline(
    builder: Builder, closed: core.ClosedJaxpr, inputs: Sequence[int], scope: str = ""
) -> list[int]:
    """Adds the equations of a jaxpr to a graph; returns the jaxpr's outputs."""
    known: dict[Any, int] = dict(zip(closed.jaxpr.invars, inputs, strict=True))
    for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        known[var] = builder.constant(value)

    def read(atom: Any) -> int:
        if isinstance(atom, core.Literal):
            aval: Any = atom.aval
            return builder.constant(np.asarray(atom.val, aval.dtype))
        return known[atom]

    for eqn in closed.jaxpr.eqns:
        path = scopes.join(scope, scopes.text_of(eqn))
        values = [read(atom) for atom in eqn.invars]
        outputs = _equation(builder, closed.jaxpr, eqn, values, path)
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars]


def _equation(
    builder: Builder, jaxpr: Any, eqn: Any, inputs: list[int], path: str
) -> list[int]:
    """Adds an equation, inlined, unrolled or folded where possible; returns outputs."""
    name = eqn.primitive.name
    if name in _IDENTITIES or _converts_nothing(eqn):
        return list(inputs)
    if name == "scan":
        avals = [builder.values[i] for i in inputs]
        unrolled = jax.make_jaxpr(lambda *values: _unrolled(eqn, values))(*avals)
        return inline(builder, unrolled, inputs, path)
    body = equations.called_body(eqn)
    if body is not None:
        return inline(builder, body, inputs, path)
    if name in _CONTROL_FLOW:
        raise ValueError(
            f"{path or 'the function'} has a {name}, whose steps depend on data: a "
            "file has no control flow, in float or not. Scans of a known length are "
            "unrolled; take other loops and conditions out of what is exported"
        )
    is_made = name == OPERAND
    operator: Any = eqn.params["operator"] if is_made else Equation(eqn, jaxpr)
    if not is_made and _is_foldable(builder, eqn, inputs):
        with jax.ensure_compile_time_eval():
            results = operator.compute_all(*(builder.constants[i] for i in inputs))
        return [builder.constant(result) for result in results]
    outputs = [builder.value(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
    path = module_scopes.resolved(scopes.parse(path).path).path
    builder.append(Node(operator, tuple(inputs), tuple(outputs), path))
    return outputs


def _converts_nothing(eqn: Any) -> bool:
    if eqn.primitive.name != "convert_element_type":
        return False
    return bool(eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype)


def _is_foldable(builder: Builder, eqn: Any, inputs: Sequence[int]) -> bool:
    """Whether an equation has constant inputs, and outputs that can be stored."""
    if eqn.effects or not all(i in builder.constants for i in inputs):
        return False
    if any(jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in eqn.outvars):
        return False
    return sum(math.prod(v.aval.shape) for v in eqn.outvars) <= _LARGEST_CONSTANT


def _unrolled(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Computes a scan step by step, without a loop."""
    scan = equations.Scan.of(eqn)
    consts, carry, scanned = scan.of_inputs(values)
    body = core.jaxpr_as_fun(scan.body)
    stacks: list[list[Any]] = []
    steps = range(scan.length)
    for step in reversed(steps) if scan.reverse else steps:
        slices = [lax.index_in_dim(x, step, keepdims=False) for x in scanned]
        carry, results = scan.of_outputs(body(*consts, *carry, *slices))
        stacks.append(results)
    if scan.reverse:
        stacks.reverse()
    shapes = [v.aval for v in scan.of_outputs(eqn.outvars)[1]]
    stacked = [
        jnp.stack([results[i] for results in stacks])
        if stacks
        else jnp.zeros(shape.shape, shape.dtype)
        for i, shape in enumerate(shapes)
    ]
    return [*carry, *stacked]
