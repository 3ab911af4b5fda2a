"""Plans the contractions in rules that a function has for its own gradient.

Those that are recognized belong to the contraction of the function whose gradient they
are. All others stay in float, and are in the plan for themselves.
"""

import collections
import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from aqtlite.contraction import differentiation
from aqtlite.jaxpr import registry, rule_sites, user_rules
from aqtlite.jaxpr.origins import NOTHING, Origin
from aqtlite.jaxpr.rule_sites import InCall
from aqtlite.jaxpr.sites import Site
from aqtlite.operations import SIDES, DotGeneral, Operation
from aqtlite.program import unsummed
from aqtlite.program.equation import why_not_quantized
from aqtlite.program.gradient_rules.recognized import Again, Gradient, recognized
from aqtlite.program.naming import Name
from aqtlite.program.planned import PlannedContraction
from aqtlite.program.planned_operand import PlannedOperand
from aqtlite.program.rules import matching
from aqtlite.program.rules.rules import Rule
from aqtlite.program.undecided import undecided

STEP = "gradient"
"""Last step of the paths of contractions in rules that stay in float."""


def added(
    planned: Sequence[PlannedContraction],
    calls: Sequence[Site],
    rules: Sequence[Rule],
    parameters: Collection[int],
) -> list[PlannedContraction]:
    """Returns the contractions of a program with those in rules of its functions.

    Args:
        planned: contractions of the program, and of the functions in it.
        calls: calls of functions with `jax.custom_vjp` or `jax.custom_jvp`.
        rules: rules for the contractions.
        parameters: indices of the program's inputs that are parameters.
    """
    by_location = {one.site.location: one for one in planned}
    counts: collections.Counter[str] = collections.Counter()
    others = []
    for call in filter(keeps_rules, calls):
        start = call.location
        inside = [at for at in by_location if at[: len(start)] == start]
        made_by = user_rules.CALLS[call.eqn.primitive.name]
        for at in inside:
            by_location[at] = dataclasses.replace(
                by_location[at], rule_of_gradient=made_by
            )
        if "shard_map" in call.around:
            why = f"{made_by} inside jax.shard_map, whose rule is not entered"
            for at in inside:
                by_location[at] = dataclasses.replace(
                    by_location[at], why_gradients_float=why
                )
            continue
        of_call = user_rules.of(call.eqn)
        if of_call is None:
            continue
        within = rule_sites.find(call, of_call)
        scope = call.scope.path
        path, module = scope, scope
        if inside:
            path = by_location[inside[0]].path.partition("#")[0]
            module = by_location[inside[0]].module
        path = "/".join(filter(None, (path, STEP)))
        for site in (*within.forward, *within.backward):
            if is_quantized_already(site):
                continue
            found = recognized(site, within)
            where = () if found is None else within.function[found.number].location
            if found is None or where not in by_location:
                number, counts[path] = counts[path], counts[path] + 1
                numbered = f"{path}#{number}" if number else path
                name = Name(numbered, module, path)
                one = _in_float(site, name, call, within, parameters)
                others.append(_decided(one, rules, made_by))
            elif not _sums_one(found, by_location[where]):
                by_location[where] = _with(by_location[where], found)
    return [*by_location.values(), *others]


def keeps_rules(call: Site) -> bool:
    """Whether the rules of a call are what gives its gradient."""
    return (
        not is_quantized_already(call)
        and not call.scope.is_of_gradient
        and not {"while", *user_rules.CALLS}.intersection(call.around)
        and registry.name_of(call.eqn) is None
    )


def is_quantized_already(site: Site) -> bool:
    """Whether an equation is part of a quantized contraction."""
    return differentiation.SCOPE in site.scope.path.split("/")


def _sums_one(found: Gradient | Again, one: PlannedContraction) -> bool:
    """Whether there is nothing to quantize in a gradient, as of a single example."""
    if isinstance(found, Again):
        return False
    if one.op == "dot_general":  # Mapped, it may leave a sum over examples.
        shapes = [atom.aval.shape for atom in found.site.eqn.invars]
        dims = found.site.eqn.params["dimension_numbers"]
        operation: Operation = DotGeneral.of(dims, *shapes)
        other = shapes[1]
    else:
        forward, *avals = one.types()
        operation = forward.gradient(found.side)
        other = avals[1 - SIDES.index(found.side)].shape
    return operation.sums_nothing or operation.sums_one(other)


def _with(one: PlannedContraction, found: Gradient | Again) -> PlannedContraction:
    if isinstance(found, Gradient):
        return dataclasses.replace(one, gradients=(*one.gradients, found))
    return dataclasses.replace(one, again=(*one.again, found))


def _in_float(
    site: Site,
    name: Name,
    call: Site,
    within: InCall,
    parameters: Collection[int],
) -> PlannedContraction:
    """Returns a contraction in a rule that is not recognized."""
    lhs, rhs = (
        _operand(atom.aval, origin, call, within, parameters)
        for atom, origin in zip(site.eqn.invars[:2], site.operands, strict=True)
    )
    one = undecided(site, name, name.path, lhs, rhs)
    return dataclasses.replace(one, why_float="no rule names it")


def _operand(
    aval: Any, origin: Origin, call: Site, within: InCall, parameters: Collection[int]
) -> PlannedOperand:
    if origin.inputs & within.gradients:
        return PlannedOperand(aval.shape, aval.dtype.name, "gradient")
    needed = NOTHING.union(*(call.operands[i].needed for i in origin.inputs))
    return PlannedOperand.of(aval, Origin(needed), parameters)


def _decided(
    one: PlannedContraction, rules: Sequence[Rule], made_by: str
) -> PlannedContraction:
    """Returns a contraction in a rule with the reason why it stays in float."""
    index = matching.first_fulfilled(one, rules)
    cfg = None if index is None else rules[index].cfg
    why = why_not_quantized(one.site.eqn) or unsummed.why_alone(one)
    is_left_alone = unsummed.is_reason(why)
    if why is None and index is not None:
        why = f"rule {index} leaves it so"
        if cfg is not None and cfg.is_quantized:
            why = one.site.obstacle or (
                f"it is in the rule of a {made_by}, and neither the gradient of a "
                "contraction of its function nor one of these again"
            )
    return dataclasses.replace(
        one,
        rule=index,
        why_float=why or one.why_float,
        is_left_alone=is_left_alone,
    )
