"""Slicing: the part of a jaxpr that computes some of its outputs."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from aqtlite.jaxpr import analysis, equations, marks
from aqtlite.shapes.sharding import shape_of, zeros


@dataclasses.dataclass(frozen=True)
class Slice:
    """A part of a jaxpr, as a function."""

    jaxpr: core.ClosedJaxpr
    inputs: tuple[int, ...]
    """Indices, in the whole jaxpr, of the part's inputs, in order."""

    treedef: Any
    """Structure of its outputs."""

    def __call__(self, *inputs: Any) -> Any:
        return self.unflatten(core.jaxpr_as_fun(self.jaxpr)(*inputs))

    def unflatten(self, leaves: Any) -> Any:
        """Returns one value for each output of the jaxpr in the outputs' structure."""
        return jax.tree.unflatten(self.treedef, leaves)


def slice_outputs(closed: core.ClosedJaxpr, outputs: Any) -> Slice:
    """Returns the part of a jaxpr that computes some outputs from the inputs they need.

    Args:
        closed: the whole jaxpr.
        outputs: pytree of indices of outputs.

    Returns:
        A function of the needed inputs that returns a pytree of values in place of the
        indices.
    """
    wanted, treedef = jax.tree.flatten(outputs)
    of_output = analysis.output_dependencies(closed)
    kept = sorted(frozenset().union(*(of_output[i] for i in wanted)))
    invars = closed.jaxpr.invars

    def evaluate(*values: Any) -> list[Any]:
        inputs: list[Any] = [None] * len(invars)
        for i, value in zip(kept, values, strict=True):
            inputs[i] = value
        return _evaluate(closed, inputs, wanted)

    shapes = [shape_of(invars[i].aval) for i in kept]
    return Slice(jax.make_jaxpr(evaluate)(*shapes), tuple(kept), treedef)


def _evaluate(
    closed: core.ClosedJaxpr, inputs: Sequence[Any], outputs: Sequence[int]
) -> list[Any]:
    """Evaluates some outputs of a jaxpr with only the equations that they need.

    Calls are inlined; scans keep the needed part of their body.

    Args:
        closed: the jaxpr.
        inputs: values of the inputs; None for inputs that are not needed.
        outputs: indices of the outputs, in the order wanted.
    """
    jaxpr = closed.jaxpr
    known = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    known.update(zip(jaxpr.invars, inputs, strict=True))
    wanted = [jaxpr.outvars[i] for i in outputs]
    needed = {atom for atom in wanted if not isinstance(atom, core.Literal)}
    steps = []
    for eqn in reversed(jaxpr.eqns):
        used = [i for i, var in enumerate(eqn.outvars) if var in needed]
        if used:
            steps.append((eqn, used))
            needed.update(_needed_inputs(eqn, used))

    def read(atom: Any) -> Any:
        if isinstance(atom, core.Literal):
            return equations.literal_value(atom)
        return known.get(atom)

    for eqn, used in reversed(steps):
        values = [read(atom) for atom in eqn.invars]
        results = _evaluate_equation(jaxpr, eqn, values, used)
        known.update(zip((eqn.outvars[i] for i in used), results, strict=True))
    return [read(atom) for atom in wanted]


def _needed_inputs(eqn: Any, used: Sequence[int]) -> list[Any]:
    """Returns the variables that some of an equation's outputs depend on."""
    of_output = analysis.equation_dependencies(eqn)
    indices = frozenset().union(*(of_output[i] for i in used))
    atoms = [eqn.invars[i] for i in indices]
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def _evaluate_equation(
    jaxpr: Any, eqn: Any, inputs: list[Any], used: Sequence[int]
) -> list[Any]:
    if eqn.primitive is primitives.scan_p:
        return _evaluate_scan(eqn, inputs, used)
    mapped = marks.mapped_call(eqn)
    if mapped is not None:
        axes = [0 if one else None for one in mapped.is_mapped]
        run = functools.partial(_evaluate, mapped.body, outputs=used)
        return jax.vmap(run, (axes,))(inputs)
    body = equations.called_body(eqn)
    if body is not None:
        return _evaluate(body, inputs, used)
    return equations.evaluate(jaxpr, eqn, inputs, [eqn.outvars[i] for i in used])


def _evaluate_scan(eqn: Any, inputs: list[Any], used: Sequence[int]) -> list[Any]:
    scan = equations.Scan.of(eqn)
    carried = _live_carry(scan, used)
    stacked = [i for i in used if i >= scan.num_carry]
    consts, carry, scanned = scan.of_inputs(inputs)
    start = [
        # The first step overwrites a carry whose initial value is not needed.
        _zeros(eqn.outvars[i].aval) if carry[i] is None else carry[i]
        for i in carried
    ]

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        full: list[Any] = [None] * scan.num_carry
        for i, value in zip(carried, carry, strict=True):
            full[i] = value
        values = [*consts, *full, *slices]
        results = _evaluate(scan.body, values, [*carried, *stacked])
        return results[: len(carried)], results[len(carried) :]

    final, stacks = lax.scan(
        step, start, scanned, length=scan.length, reverse=scan.reverse
    )
    by_index = dict(zip([*carried, *stacked], [*final, *stacks], strict=True))
    return [by_index[i] for i in used]


def _zeros(aval: Any) -> Any:
    return zeros(shape_of(aval))


def _live_carry(scan: equations.Scan, used: Sequence[int]) -> list[int]:
    """Returns the parts of the carry that the used outputs need, over all steps."""
    first, count = scan.num_consts, scan.num_carry
    of_output = analysis.output_dependencies(scan.body)
    live = {i for i in used if i < count}
    while True:
        wanted = live | {i for i in used if i >= count}
        reached = {
            index - first
            for i in wanted
            for index in of_output[i]
            if first <= index < first + count
        }
        if reached <= live:
            return sorted(live)
        live |= reached
