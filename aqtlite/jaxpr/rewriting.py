"""Evaluation of a jaxpr with some of its equations replaced.

All other equations run unchanged, consecutive ones together (`repeated`). An equation
with a replacement in its body is rebuilt by the function of JAX that made it. The
result is ordinary traceable code.

A replacement may take further arrays and return auxiliary ones. Loops around it pass
them on: a scan slices and stacks them along its steps, or carries them.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from aqtlite.jaxpr import equations, registry, repeated, scopes
from aqtlite.jaxpr.higher_order import BUILDERS
from aqtlite.jaxpr.replacement import (
    Aux,
    Inside,
    Location,
    Replacement,
    Replacements,
)


def evaluate(
    closed: core.ClosedJaxpr, inputs: Sequence[Any], replacements: Replacements
) -> tuple[list[Any], Aux]:
    """Evaluates a jaxpr.

    Args:
        closed: the jaxpr.
        inputs: values of the inputs.
        replacements: replacements of equations, by location. `enters` must be true for
            all equations around them.

    Returns:
        Values of the outputs, and the auxiliary arrays of replacements.
    """
    jaxpr = closed.jaxpr
    known = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    known.update(zip(jaxpr.invars, inputs, strict=True))
    inside: dict[int, dict[Location, Replacement]] = {}
    for location, one in replacements.items():
        inside.setdefault(location[0][0], {})[location] = one
    aux: Aux = {}

    def read(atom: Any) -> Any:
        if isinstance(atom, core.Literal):
            return equations.literal_value(atom)
        return known[atom]

    parts = list(_parts(jaxpr, inside))
    runs = iter(repeated.functions([one for one in parts if not isinstance(one, int)]))
    for part in parts:
        if isinstance(part, int):
            eqn = jaxpr.eqns[part]
            values = [read(atom) for atom in eqn.invars]
            with _scope_of(eqn):
                results, of_equation = _replaced(eqn, values, inside[part])
            known.update(zip(eqn.outvars, results, strict=True))
            aux.update(of_equation)
        else:
            values = [known[var] for var in part.invars]
            results = next(runs)(*values)
            known.update(zip(part.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars], aux


def _parts(jaxpr: Any, stops: Mapping[int, Any]) -> Iterator[Any]:
    """Yields indices of equations to replace, and jaxprs of the equations between."""
    ends = sorted({*stops, len(jaxpr.eqns)})
    used_after = _used_after(jaxpr, ends)
    start = 0
    for end in ends:
        if start < end:
            yield _part(jaxpr, jaxpr.eqns[start:end], used_after[end])
        if end in stops:
            yield end
        start = end + 1


def _used_after(jaxpr: Any, indices: Sequence[int]) -> dict[int, set[Any]]:
    """Returns, for each index, the variables that are read from that equation on."""
    wanted, found = set(indices), {}
    used = {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
    for index in range(len(jaxpr.eqns), -1, -1):
        if index < len(jaxpr.eqns):
            atoms = jaxpr.eqns[index].invars
            used.update(a for a in atoms if not isinstance(a, core.Literal))
        if index in wanted:
            found[index] = set(used)
    return found


def _part(jaxpr: Any, eqns: Sequence[Any], used_after: set[Any]) -> Any:
    """Returns a jaxpr of consecutive equations."""
    made = [
        var for eqn in eqns for var in eqn.outvars if not isinstance(var, core.DropVar)
    ]
    read = dict.fromkeys(
        atom
        for eqn in eqns
        for atom in eqn.invars
        if not isinstance(atom, core.Literal)
    )
    is_made = set(made)
    inputs = (var for var in read if var not in is_made)
    outputs = (var for var in made if var in used_after)
    return equations.part(jaxpr, eqns, inputs, outputs)


@contextlib.contextmanager
def _scope_of(eqn: Any) -> Iterator[None]:
    """Applies the name scope and context of an equation to its replacement.

    The context is metadata for XLA and, before JAX 0.12, the place of computation
    (`jax.experimental.compute_on`, which has had a body since). It is only available
    from the `ctx` of an equation. Should JAX remove that, both are lost, and a test of
    this file fails.
    """
    text = scopes.text_of(eqn)
    with eqn.ctx.manager, jax.named_scope(text) if text else contextlib.nullcontext():
        yield


def _replaced(
    eqn: Any, values: list[Any], here: Mapping[Location, Replacement]
) -> tuple[Sequence[Any], Aux]:
    """Evaluates an equation that is replaced, or has replacements in its bodies."""
    for location, one in here.items():
        if len(location) == 1:
            outputs, aux = one.function(values, one.given)
            return outputs, {location: aux} if one.has_aux else {}
    inside, name = Inside(here, evaluate), registry.name_of(eqn)
    if name is not None:
        return inside.body(registry.body_of(eqn, name), 0, values)
    return BUILDERS[equations.kind_of(eqn)](eqn, values, inside)


def enters(eqn: Any) -> bool:
    """Whether equations in the bodies of an equation can be replaced."""
    return equations.kind_of(eqn) in BUILDERS
