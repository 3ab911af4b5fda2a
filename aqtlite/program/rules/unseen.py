"""Products of floats that rules do not quantize: operations that they do not enter."""

import dataclasses
from collections.abc import Iterator, Sequence

from aqtlite import errors
from aqtlite.jaxpr import equations, user_rules
from aqtlite.jaxpr.recognition import opaque, producers, written_products
from aqtlite.jaxpr.sites import Site
from aqtlite.program.gradient_rules import in_rules
from aqtlite.program.rules import patterns
from aqtlite.program.rules.rules import ANY_PATH, Rule


@dataclasses.dataclass(frozen=True)
class Unseen:
    """An operation on floats that may contract, and stays as it is."""

    path: str
    """Name scopes around it; in the rule of a gradient, with a last step more."""

    op: str
    """Name of its primitive."""

    why_float: str
    """Reason why it stays in float."""

    rule: int | None
    """Index of the first rule for its path and any operation; None if there is none."""

    def is_left(self, rules: Sequence[Rule]) -> bool:
        """Whether a rule leaves it as it is."""
        return self.rule is not None and rules[self.rule].cfg is None

    def __str__(self) -> str:
        return f"  {errors.label(self.path)}: {self.why_float}"


def found(
    others: Sequence[Site],
    calls: Sequence[Site],
    rules: Sequence[Rule],
    program: producers.Body,
) -> tuple[Unseen, ...]:
    """Returns such operations, those of equal paths and names once.

    Args:
        others: equations of primitives of such names.
        calls: calls of functions with rules for their gradients.
        rules: the rules.
        program: the program.
    """
    named = [*_in_function(others, program), *_in_rules(calls)]
    return tuple(
        Unseen(path, op, why, _rule_for(path, rules))
        for path, op, why in dict.fromkeys(named)
    )


def _in_function(
    others: Sequence[Site], program: producers.Body
) -> Iterator[tuple[str, str, str]]:
    for site in others:
        why = opaque.why(site.eqn)
        if site.eqn.primitive.name == written_products.PRIMITIVE:
            is_product = written_products.is_product(site, program)
            why = written_products.WHY_FLOAT if is_product else None
        if why is not None and not in_rules.is_quantized_already(site):
            yield _path(site), str(site.eqn.primitive.name), why


def _in_rules(calls: Sequence[Site]) -> Iterator[tuple[str, str, str]]:
    for call in filter(in_rules.keeps_rules, calls):
        rules = None
        if "shard_map" not in call.around:
            rules = user_rules.of(call.eqn)
        for closed in () if rules is None else (rules.forward, rules.backward):
            for eqn in equations.with_bodies(closed):
                why = opaque.why(eqn)
                if why is not None:
                    path = "/".join(filter(None, (_path(call), in_rules.STEP)))
                    yield path, str(eqn.primitive.name), why


def _path(site: Site) -> str:
    return site.scope.path


def _rule_for(path: str, rules: Sequence[Rule]) -> int | None:
    """Returns the index of the first rule for a path and for any operation."""
    fitting = (
        index
        for index, rule in enumerate(rules)
        if rule.ops is None
        and (rule.path == ANY_PATH or patterns.fullmatch(rule.path, path))
    )
    return next(fitting, None)
