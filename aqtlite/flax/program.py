"""What depends on what in a traced program, and the part of it that some outputs need.

A *program* is a closed jaxpr. The walk follows calls and scans into their bodies; of
anything else (`while`, `cond`) it takes every output to depend on every input, which
errs on the safe side.

A value of interest inside a program, wherever it is, is found again by a *mark*: a
name given by `jax.ad_checkpoint.checkpoint_name`, which computes nothing.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

Dependencies = frozenset[int]
_NOTHING: Dependencies = frozenset()

_CALLS = (
    primitives.jit_p,
    primitives.call_p,
    primitives.closed_call_p,
    primitives.remat_p,
    primitives.custom_jvp_call_p,
    primitives.custom_vjp_call_p,
)

# Takes a mark, what the marked value depends on, and whether it is in a branch or loop
# that the walk does not follow; returns what to take it to depend on.
_Visit = Callable[[str, Dependencies, bool], Dependencies]


@dataclasses.dataclass(frozen=True)
class Marked:
    """A marked value of a program."""

    dependencies: Dependencies
    is_opaque: bool
    """Whether it is inside a branch, or a loop other than a scan."""


def output_dependencies(
    program: core.ClosedJaxpr, without: Collection[str] = ()
) -> list[Dependencies]:
    """For each output, the indices of the inputs that its value depends on.

    Args:
        program: the program.
        without: marks of values that are taken to depend on nothing.
    """

    def visit(mark: str, dependencies: Dependencies, is_opaque: bool) -> Dependencies:
        del is_opaque
        return _NOTHING if mark in without else dependencies

    inputs = [frozenset({i}) for i in range(len(program.jaxpr.invars))]
    return _walk(program.jaxpr, inputs, visit)


def marked_values(program: core.ClosedJaxpr) -> dict[str, Marked]:
    """The marked values of a program, by mark."""
    found: dict[str, Marked] = {}

    def visit(mark: str, dependencies: Dependencies, is_opaque: bool) -> Dependencies:
        before = found.get(mark, Marked(_NOTHING, False))
        found[mark] = Marked(
            before.dependencies | dependencies, before.is_opaque or is_opaque
        )
        return dependencies

    inputs = [frozenset({i}) for i in range(len(program.jaxpr.invars))]
    _walk(program.jaxpr, inputs, visit)
    return found


def _keep(mark: str, dependencies: Dependencies, is_opaque: bool) -> Dependencies:
    del mark, is_opaque
    return dependencies


def _walk(
    jaxpr: Any, inputs: Sequence[Dependencies], visit: _Visit = _keep
) -> list[Dependencies]:
    known = dict.fromkeys(jaxpr.constvars, _NOTHING)
    known.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Dependencies:
        return _NOTHING if isinstance(atom, core.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        outputs = _equation(eqn, [read(atom) for atom in eqn.invars], visit)
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _equation(
    eqn: Any, inputs: list[Dependencies], visit: _Visit = _keep
) -> list[Dependencies]:
    if eqn.primitive is primitives.name_p:
        return [visit(eqn.params["name"], inputs[0], False)]
    if eqn.primitive is primitives.scan_p:
        return _scan(eqn, inputs, visit)
    body = called_body(eqn)
    if body is not None:
        return _walk(body.jaxpr, inputs, visit)
    if visit is not _keep:
        _visit_inside(eqn, inputs, visit)
    return [_NOTHING.union(*inputs)] * len(eqn.outvars)


def _visit_inside(eqn: Any, inputs: list[Dependencies], visit: _Visit) -> None:
    """Visits the marks in branches and loops."""

    def opaque(mark: str, dependencies: Dependencies, is_opaque: bool) -> Dependencies:
        del is_opaque
        return visit(mark, dependencies, True)

    everything = _NOTHING.union(*inputs)
    if eqn.primitive is primitives.cond_p:
        for branch in eqn.params["branches"]:
            _walk(branch.jaxpr, inputs[1:], opaque)
    elif eqn.primitive is primitives.while_p:
        body, first = eqn.params["body_jaxpr"].jaxpr, eqn.params["cond_nconsts"]
        consts = inputs[first : first + eqn.params["body_nconsts"]]
        carry = [everything] * (len(body.invars) - len(consts))
        _walk(body, [*consts, *carry], opaque)
    else:
        for mark in _marks_inside(eqn):
            visit(mark, everything, True)


def _marks_inside(eqn: Any) -> Iterator[str]:
    for body in _bodies(eqn):
        for inner in body.jaxpr.eqns:
            if inner.primitive is primitives.name_p:
                yield inner.params["name"]
            yield from _marks_inside(inner)


def _scan(
    eqn: Any, inputs: list[Dependencies], visit: _Visit = _keep
) -> list[Dependencies]:
    """What goes into the carry comes around until nothing new does."""
    first, count = eqn.params["num_consts"], eqn.params["num_carry"]
    while True:
        outputs = _walk(eqn.params["jaxpr"].jaxpr, inputs, visit)
        carry = inputs[first : first + count]
        merged = [a | b for a, b in zip(carry, outputs[:count], strict=True)]
        if merged == carry:
            return outputs
        inputs = inputs[:first] + merged + inputs[first + count :]


def called_body(eqn: Any) -> core.ClosedJaxpr | None:
    """The body of an equation that just calls it (jit, remat, custom_vjp, ...).

    None for every other equation: the body's inputs and outputs have to be the
    equation's, one to one. That is decided by what the equation is: the computation of
    a `lax.reduce` may look like a body too.
    """
    if eqn.primitive not in _CALLS:
        return None
    bodies = list(_bodies(eqn))
    return bodies[0] if len(bodies) == 1 else None


def _bodies(eqn: Any) -> Iterator[core.ClosedJaxpr]:
    for value in eqn.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, core.ClosedJaxpr):
                yield one
            elif isinstance(one, core.Jaxpr) and not one.constvars:
                yield core.ClosedJaxpr(one, ())


def cut(
    program: core.ClosedJaxpr, outputs: Sequence[int]
) -> tuple[core.ClosedJaxpr, list[int]]:
    """The part of a program that makes some of its outputs.

    Calls are inlined, and scans keep the part of their body that is needed, so that
    what is left takes no input that the outputs do not depend on.

    Args:
        program: the whole.
        outputs: indices of the outputs to keep, in the order wanted.

    Returns:
        The program cut down, and the indices of the inputs that it still takes.
    """
    dependencies = output_dependencies(program)
    kept = sorted(_NOTHING.union(*(dependencies[i] for i in outputs)))
    invars = program.jaxpr.invars

    def evaluate(*values: Any) -> list[Any]:
        inputs: list[Any] = [None] * len(invars)
        for i, value in zip(kept, values, strict=True):
            inputs[i] = value
        return _evaluate(program, inputs, outputs)

    avals = [invars[i].aval for i in kept]
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    return jax.make_jaxpr(evaluate)(*shapes), kept


def _evaluate(
    program: core.ClosedJaxpr, inputs: Sequence[Any], outputs: Sequence[int]
) -> list[Any]:
    """Runs what some outputs need; inputs that they do not need may be None."""
    jaxpr = program.jaxpr
    known = dict(zip(jaxpr.constvars, program.consts, strict=True))
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
        return atom.val if isinstance(atom, core.Literal) else known.get(atom)

    for eqn, used in reversed(steps):
        values = [read(atom) for atom in eqn.invars]
        results = _run_equation(jaxpr, eqn, values, used)
        known.update(zip((eqn.outvars[i] for i in used), results, strict=True))
    return [read(atom) for atom in wanted]


def _needed_inputs(eqn: Any, used: Sequence[int]) -> list[Any]:
    """The variables that some of an equation's outputs depend on."""
    dependencies = _equation(eqn, [frozenset({i}) for i in range(len(eqn.invars))])
    indices = _NOTHING.union(*(dependencies[i] for i in used))
    atoms = [eqn.invars[i] for i in indices]
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def _run_equation(
    jaxpr: Any, eqn: Any, inputs: list[Any], used: Sequence[int]
) -> list[Any]:
    if eqn.primitive is primitives.scan_p:
        return _run_scan(eqn, inputs, used)
    body = called_body(eqn)
    if body is not None:
        return _evaluate(body, inputs, used)
    # A program of this one equation, evaluated by the only public way there is.
    variables = {
        atom: value
        for atom, value in zip(eqn.invars, inputs, strict=True)
        if not isinstance(atom, core.Literal)
    }
    single = jaxpr.replace(
        constvars=[],
        invars=list(variables),
        outvars=[eqn.outvars[i] for i in used],
        eqns=[eqn],
        effects=eqn.effects,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    function = core.jaxpr_as_fun(core.ClosedJaxpr(single, ()))
    return function(*variables.values())


def _run_scan(eqn: Any, inputs: list[Any], used: Sequence[int]) -> list[Any]:
    body, num_consts = eqn.params["jaxpr"], eqn.params["num_consts"]
    num_carry = eqn.params["num_carry"]
    carried = _live_carry(eqn, used)
    stacked = [i for i in used if i >= num_carry]
    consts = inputs[:num_consts]
    start = [inputs[num_consts + i] for i in carried]

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        full: list[Any] = [None] * num_carry
        for i, value in zip(carried, carry, strict=True):
            full[i] = value
        results = _evaluate(body, [*consts, *full, *slices], [*carried, *stacked])
        return results[: len(carried)], results[len(carried) :]

    final, stacks = lax.scan(
        step,
        start,
        inputs[num_consts + num_carry :],
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
    )
    by_index = dict(zip([*carried, *stacked], [*final, *stacks], strict=True))
    return [by_index[i] for i in used]


def _live_carry(eqn: Any, used: Sequence[int]) -> list[int]:
    """The parts of the carry that the outputs in use depend on, over any steps."""
    first, count = eqn.params["num_consts"], eqn.params["num_carry"]
    body = eqn.params["jaxpr"].jaxpr
    dependencies = _walk(body, [frozenset({i}) for i in range(len(body.invars))])
    live = {i for i in used if i < count}
    while True:
        wanted = live | {i for i in used if i >= count}
        reached = {
            index - first
            for i in wanted
            for index in dependencies[i]
            if first <= index < first + count
        }
        if reached <= live:
            return sorted(live)
        live |= reached
