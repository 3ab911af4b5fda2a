"""Rules that are of no use: that match nothing, in whole or in part."""

import difflib
from collections.abc import Iterator, Mapping, Sequence

from jax.extend import core

from aqtlite.errors import RulesError
from aqtlite.jaxpr import registry, sites
from aqtlite.jaxpr.recognition import lookups
from aqtlite.program.naming import Name, Naming
from aqtlite.program.planned_lookup import Planned
from aqtlite.program.rules import matching, overshadowed, patterns
from aqtlite.program.rules.rules import ANY_PATH, Rule


def check_used(
    rules: Sequence[Rule],
    index: int,
    planned: Sequence[Planned],
    closed: core.ClosedJaxpr,
    parameters: Mapping[int, str],
    naming: Naming,
) -> None:
    """Checks that a required rule, or another one of its group, decides.

    Args:
        rules: the rules.
        index: index of the rule.
        planned: contractions and lookups of the program.
        closed: the program.
        parameters: names of its inputs that are parameters, by index.
        naming: function that gives contractions their names.

    Raises:
        RulesError: if not, of a message that says what it matches instead.
    """
    rule, group = rules[index], rules[index].group
    beside = [
        i
        for i, other in enumerate(rules)
        if i == index or (group is not None and other.group == group)
    ]
    if any(one.rule in beside for one in planned):
        return
    met = [
        one for one in planned if any(matching.fulfils(one, rules[i]) for i in beside)
    ]
    if not met:
        hint = _lookups(rule, closed, parameters, naming)
        message = matching.nothing_fulfils(rule, index, planned, closed)
        raise RulesError(message + hint + _of_group(rule, beside))
    deciding = {one.rule for one in met if one.rule is not None}
    overshadowed.check(rules, index, deciding, "any contraction")


def alternatives(rules: Sequence[Rule], planned: Sequence[Planned]) -> Iterator[str]:
    """Yields messages about alternatives of required rules that match nothing."""
    for index, rule in enumerate(rules):
        for name in ("path", "module") if rule.is_required else ():
            pattern = getattr(rule, name)
            if pattern in (None, ANY_PATH):
                continue
            texts = sorted({getattr(one, name) for one in planned})
            for alternative, alone in patterns.alternatives(pattern):
                if not any(patterns.fullmatch(alone, text) for text in texts):
                    nearest = difflib.get_close_matches(alone, texts, 3, cutoff=0.0)
                    yield (
                        f"rule {index}: the alternative {alternative!r} of "
                        f"{name}={pattern!r} matches nothing; near it are "
                        f"{', '.join(map(repr, nearest))}"
                    )


def _of_group(rule: Rule, numbers: Sequence[int]) -> str:
    """Returns a hint that another rule of a group may match instead.

    Args:
        rule: the rule.
        numbers: indices of the rules of its group.
    """
    if len(numbers) == 1:
        return ""
    listed = ", ".join(map(str, numbers))
    return f"\nOne rule of the group {rule.group!r} has to match: rules {listed}."


def _lookups(
    rule: Rule, closed: core.ClosedJaxpr, parameters: Mapping[int, str], naming: Naming
) -> str:
    """Returns a hint if a rule that matches no contraction names lookups in a table.

    Args:
        rule: the rule.
        closed: the program.
        parameters: names of its inputs that are parameters, by index.
        naming: function that gives contractions their names.
    """
    if registry.LOOKUP in (rule.ops or ()):
        return (
            "\nLookups are table[indices], jnp.take and layers such as nn.Embed that "
            "read whole rows of a matrix of parameters: params= says which arguments "
            "are parameters."
        )
    if (rule.path, rule.module) == (ANY_PATH, None):
        return ""
    found = [
        site
        for site in sites.find(closed, parameters, lookups.PRIMITIVES).contractions
        if site.operands[0].identity is not None
    ]
    names = naming(found, parameters)
    named = sorted({name.path for name in names if _is_named(name, rule)})
    if not named:
        return ""
    return (
        f"\nIt names a lookup of rows ({', '.join(map(repr, named[:3]))}), which is no "
        'contraction: Rule(op="take", cfg=...) quantizes the table for lookups. A '
        "contraction of it (Embed.attend) is quantized by a rule for that, and reads "
        "the same integers if both give the table the same fwd.rhs."
    )


def _is_named(name: Name, rule: Rule) -> bool:
    of_module = rule.module is None or patterns.fullmatch(rule.module, name.module)
    return of_module and patterns.fullmatch(rule.path, name.path)
