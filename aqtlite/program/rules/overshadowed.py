"""The message about a rule that earlier rules leave nothing to decide."""

from collections.abc import Collection, Sequence
from typing import Any

from aqtlite.errors import RulesError

_CONDITIONS = (
    *("path", "module", "parameter", "op", "operands", "equation", "min_size"),
)
"""Fields of rules that are conditions; a class of rules may have some of them."""

_OF_FALLBACKS = {"path": ".*", "module": None, "parameter": None, "op": None}
"""Fields of a rule that may be for what the rules before it leave."""


def conditions(rule: Any, anything: str) -> str:
    """Returns the conditions of a rule that are not the default, as text.

    Args:
        rule: an `aqtlite.Rule` or `aqtlite.edge.Rule`.
        anything: text for a rule without conditions.
    """
    given = [
        f"{name}={getattr(rule, name)!r}"
        for name in _CONDITIONS
        if getattr(rule, name, None) != getattr(type(rule), name, None)
    ]
    return ", ".join(given) or anything


def check(
    rules: Sequence[Any], index: int, deciding: Collection[int], anything: str
) -> None:
    """Checks that a rule that decides nothing is a fallback.

    A rule for any path, module and operation is one: it may be for what the rules
    before it leave, which may be nothing.

    Args:
        rules: the rules.
        index: index of a required rule that decides nothing.
        deciding: indices of the rules that decide about what it matches.
        anything: text for a rule without conditions.

    Raises:
        RulesError: if the rule names a path, a module or an operation, and matches
            something.
    """
    rule = rules[index]
    if not deciding or all(
        getattr(rule, name, value) == value for name, value in _OF_FALLBACKS.items()
    ):
        return
    before = sorted(deciding)
    named = " and ".join(f"rule {i} ({conditions(rules[i], anything)})" for i in before)
    verb = "matches" if len(before) == 1 else "match"
    raise RulesError(
        f"rule {index} ({conditions(rule, anything)}) decides nothing: {named} {verb} "
        "all that it matches, and the first rule that matches decides: put rule "
        f"{index} before rule {before[0]}, or set is_required=False if that is meant"
    )
