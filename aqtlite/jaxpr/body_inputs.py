"""The origins of what an equation hands to its bodies."""

from typing import Any

from jax.extend import core
from jax.extend.core import primitives

from aqtlite.jaxpr import analysis, equations, marks, rewriting
from aqtlite.jaxpr.axes import axis_facts
from aqtlite.jaxpr.origins import NOTHING, Loop, Origin, digest


def of(
    eqn: Any,
    number: int,
    body: core.ClosedJaxpr,
    values: list[Origin],
    *,
    depth: int,
) -> list[Origin]:
    """Returns the origins of the inputs of a body of an equation.

    Args:
        eqn: the equation.
        number: index of the body among its bodies.
        body: the body.
        values: origins of the inputs of the equation.
        depth: number of scans around the equation.
    """
    count = len(body.in_avals)
    mapped = marks.mapped_call(eqn)
    if mapped is not None:
        pairs = zip(values, mapped.is_mapped, strict=True)
        return [_slice(x, depth) if one else x for x, one in pairs]
    if eqn.primitive is primitives.scan_p:
        consts, start, scanned = equations.Scan.of(eqn).of_inputs(values)
        carried = _carried(body, [*consts, *start], len(consts), scanned, depth)
        return [*consts, *carried, *(_slice(x, depth) for x in scanned)]
    if eqn.primitive is primitives.while_p:
        loop = equations.While.of(eqn)
        of_condition, of_body, start = loop.of_inputs(values)
        carried = _carried(loop.body, [*of_body, *start], len(of_body), [], depth)
        return [*(of_condition if number == 0 else of_body), *carried]
    if eqn.primitive is primitives.cond_p:
        return values[1:]
    if len(values) == count and rewriting.enters(eqn):
        return values
    # Other primitives may map inputs to those of the body in any way.
    needed = NOTHING.union(*(x.needed for x in values))
    return [
        Origin(needed, facts=axis_facts.unknown(len(aval.shape)))
        for aval in body.in_avals
    ]


def _slice(x: Origin, depth: int) -> Origin:
    """Returns the origin of the slice of a value that a step, or mapped call, takes."""
    identity, former = (one and digest("slice", one) for one in (x.identity, x.former))
    facts = x.facts._replace(axes=x.facts.axes[1:])
    return Origin(x.needed | {Loop(depth, False)}, identity, facts, former=former)


def _carried(
    body: core.ClosedJaxpr,
    values: list[Origin],
    first: int,
    scanned: list[Origin],
    depth: int,
) -> list[Origin]:
    """Returns the origins of the values that a loop carries, in any step.

    Args:
        body: body of the loop.
        values: origins of constants and of the initial carry.
        first: index of the first carried value.
        scanned: origins of the arrays that the loop slices.
        depth: number of scans around the loop.
    """
    count = len(values) - first
    inputs = [*(x.needed for x in values), *(_slice(x, depth).needed for x in scanned)]
    of_outputs = analysis.output_dependencies(body)[:count]
    variables = body.jaxpr.invars[first : first + count]
    changing = [i for i in range(count) if body.jaxpr.outvars[i] is not variables[i]]
    for i in changing:
        inputs[first + i] |= {Loop(depth, True)}
    while True:
        before = list(inputs)
        for i in changing:
            inputs[first + i] = inputs[first + i].union(
                *(inputs[needed] for needed in of_outputs[i])
            )
        if inputs == before:
            break
    return [
        Origin(
            inputs[first + i],
            facts=axis_facts.without_masks(values[first + i].facts),
        )
        if i in changing
        else values[first + i]
        for i in range(count)
    ]
