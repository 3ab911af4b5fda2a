"""Decides how rules quantize the lookups of a program."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from aqtlite import config, errors
from aqtlite.contraction import lookup
from aqtlite.jaxpr import registry
from aqtlite.jaxpr.recognition import lookups
from aqtlite.jaxpr.sites import Site
from aqtlite.operations import OperandAxes
from aqtlite.program import injected, obstacles
from aqtlite.program.gradient_rules import in_rules
from aqtlite.program.naming import Name, Naming, names_of_weights, numbered
from aqtlite.program.planned import PlannedContraction
from aqtlite.program.planned_lookup import PlannedLookup
from aqtlite.program.planned_operand import PlannedOperand
from aqtlite.program.rules import matching
from aqtlite.program.rules.rules import Rule


def planned(
    sites: Iterable[Site],
    contractions: Sequence[PlannedContraction],
    rules: Sequence[Rule],
    parameters: Mapping[int, str],
    naming: Naming,
) -> tuple[PlannedLookup, ...]:
    """Decides about the lookups of a program; none if no rule is for lookups.

    Args:
        sites: equations of `lookups.PRIMITIVES`.
        contractions: the planned contractions.
        rules: the rules.
        parameters: names of the program's inputs that are parameters, by index.
        naming: function that gives lookups their paths.
    """
    are_named = any(registry.LOOKUP in (rule.ops or ()) for rule in rules)
    found = [
        site
        for site in sites
        if (are_named or injected.config_of(site) is not None)
        and not in_rules.is_quantized_already(site)
        and _reads_parameter(site, parameters)
    ]
    names = naming(found, parameters)
    paths = numbered([name.path for name in names])
    decided = [
        _decided(site, name._replace(path=path), rules, parameters)
        for site, name, path in zip(found, names, paths, strict=True)
    ]
    # Of the others, nobody expects that they are lookups.
    kept = [
        one
        for one in decided
        if one.is_quantized
        or one.rule is not None
        or not isinstance(lookups.axis_of(one.site.eqn), str)
    ]
    return tuple(_beside_contractions(kept, contractions))


def _reads_parameter(site: Site, parameters: Mapping[int, str]) -> bool:
    aval = site.eqn.invars[0].aval
    operand = PlannedOperand.of(aval, site.operands[0], parameters)
    is_floating = jnp.issubdtype(aval.dtype, jnp.floating)
    return operand.kind == "weight" and is_floating and len(aval.shape) > 1


def _decided(
    site: Site, name: Name, rules: Sequence[Rule], parameters: Mapping[int, str]
) -> PlannedLookup:
    table, indices = (
        PlannedOperand.of(atom.aval, origin, parameters)
        for atom, origin in zip(site.eqn.invars[:2], site.operands[:2], strict=True)
    )
    given = injected.config_of(site)
    one = PlannedLookup(
        *name,
        lhs=table,
        rhs=indices,
        rule=None,
        cfg=given or config.unquantized(),
        why_float=None,
        is_injected=given is not None,
        site=site,
        parameters=names_of_weights(site, parameters),
    )
    if given is None:
        index = matching.first_fulfilled(one, rules)
        if index is None:
            return dataclasses.replace(one, why_float="no rule names it")
        one, given = dataclasses.replace(one, rule=index), rules[index].cfg
        if given is None or not given.fwd.rhs.is_quantized:
            return dataclasses.replace(one, why_float=f"rule {index} leaves it so")
    why = _why_float(site)
    if why is not None:
        cfg = config.unquantized()
        return dataclasses.replace(one, cfg=cfg, why_float=why)
    with errors.naming(one.path):
        lookup.check(given)
        axes = OperandAxes.of_contracting(2, (1 - one.axis,))
        lookup.check_blocks(given.fwd.rhs, table.shape, axes)
    cfg = config.update(config.unquantized(), {"fwd.rhs": given.fwd.rhs})
    return dataclasses.replace(one, cfg=cfg)


def _why_float(site: Site) -> str | None:
    axis = lookups.axis_of(site.eqn)
    if isinstance(axis, str):
        return axis
    if 0 in site.eqn.invars[0].aval.shape:
        return "the table is empty"
    if site.eqn.invars[0].aval.shape[1 - axis] == 1:
        return "its rows have a single element"
    around = {"custom_jvp_call", "custom_vjp_call"}.intersection(site.around)
    if around:
        return f"it is inside of a {around.pop()}, whose rule reads the float table"
    return obstacles.why_not_replaced(site)


def _beside_contractions(
    found: Sequence[PlannedLookup], contractions: Sequence[PlannedContraction]
) -> list[PlannedLookup]:
    """Returns lookups with the contraction, or earlier lookup, of the same table."""
    homes: dict[Any, str] = {}
    result = []
    for one in found:
        if one.is_quantized:
            other = next((c for c in contractions if _is_of_table(c, one)), None)
            if other is not None:
                kept_under = other.kept_under
            else:
                key = one.site.operands[0].identity, one.axis, one.cfg
                kept_under = homes.setdefault(key, one.kept_under)
            one = dataclasses.replace(one, contraction=other, kept_under=kept_under)
        result.append(one)
    return result


_NO_WEIGHTS_LEAVE = {"cond", "while", "shard_map"}


def _is_of_table(one: PlannedContraction, lookup: PlannedLookup) -> bool:
    """Whether a contraction reads the table of a lookup, quantized alike."""
    fwd, around = one.cfg.fwd, {*one.site.around, *lookup.site.around}
    if (
        not one.is_quantized
        or one.op != "dot_general"
        or fwd.rhs != lookup.cfg.fwd.rhs
        or fwd.smoothing is not None
        or fwd.rotation is not None
        or around & _NO_WEIGHTS_LEAVE
        or (one.site.lengths, one.site.per_step)
        != (lookup.site.lengths, lookup.site.per_step)
    ):
        return False
    seen, own = one.origins["rhs"], lookup.site.operands[0]
    transposed, table = seen.untransposed(2), own.untransposed(2)
    if transposed is None or table is None or transposed.identity != table.identity:
        return False
    axes = one.types()[0].axes("rhs")
    rows = transposed.permutation.index(table.permutation[lookup.axis])
    return (axes.contracting, axes.batch) == ((1 - rows,), ())
