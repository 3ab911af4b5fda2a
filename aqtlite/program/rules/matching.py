"""Which conditions of a rule a contraction meets, and the message if none does."""

import difflib
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from jax.extend import core

from aqtlite import errors
from aqtlite.jaxpr import equations, registry
from aqtlite.program.plan_table import NO_CONTRACTIONS
from aqtlite.program.planned_operand import PlannedOperand
from aqtlite.program.rules import overshadowed, patterns
from aqtlite.program.rules.rules import ANY_PATH, Rule

_OPTIONAL = "A rule with is_required=False may match nothing."


class Matched(Protocol):
    """What rules match: a contraction or a lookup."""

    @property
    def path(self) -> str: ...
    @property
    def module(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def registered(self) -> str | None: ...
    @property
    def equation(self) -> str | None: ...
    @property
    def lhs(self) -> PlannedOperand: ...
    @property
    def rhs(self) -> PlannedOperand: ...
    @property
    def size(self) -> float: ...
    @property
    def parameters(self) -> Sequence[str]: ...


def fulfils(one: Matched, rule: Rule) -> bool:
    """Whether a contraction meets all conditions of a rule."""
    return not _unfulfilled(one, rule)


def _ops(rule: Rule) -> Collection[str]:
    """Returns the operations that a rule is for: by default, any contraction."""
    return registry.OF_PRIMITIVES.values() if rule.ops is None else rule.ops


def _unfulfilled(one: Matched, rule: Rule) -> list[str]:
    """Returns the values by which a contraction fails conditions of a rule, as text."""
    num_weights = (one.lhs.kind, one.rhs.kind).count("weight")
    size = one.size
    checks: list[tuple[Callable[[], bool], str]] = [
        (
            lambda: rule.path == ANY_PATH or patterns.fullmatch(rule.path, one.path),
            f"path={one.path!r}",
        ),
        (
            lambda: bool({one.op, one.registered} & {*_ops(rule)}),
            f"op={one.registered or one.op!r}",
        ),
        (
            lambda: {
                "any": True,
                "weight": num_weights == 1,
                "activations": num_weights == 0,
            }[rule.operands],
            f"operands: {one.lhs.kind}, {one.rhs.kind}",
        ),
        (
            lambda: (
                rule.equation is None
                or patterns.fullmatch(rule.equation, one.equation or "")
            ),
            f"equation={one.equation!r}",
        ),
        (lambda: size >= rule.min_size, f"size {size}"),
        (
            lambda: rule.module is None or patterns.fullmatch(rule.module, one.module),
            f"module={one.module!r}",
        ),
        (
            lambda: (
                rule.parameter is None
                or any(patterns.fullmatch(rule.parameter, x) for x in one.parameters)
            ),
            f"parameters: {', '.join(one.parameters) or 'none'}",
        ),
        (
            lambda: rule.adapter is None or num_weights == 1,
            f"no weight for the adapter: {one.lhs.kind}, {one.rhs.kind}",
        ),
    ]
    return [text for is_fulfilled, text in checks if not is_fulfilled()]


def first_fulfilled(one: Matched, rules: Sequence[Rule]) -> int | None:
    """Returns the index of the rule that decides about a contraction, if any does."""
    return next((i for i, rule in enumerate(rules) if fulfils(one, rule)), None)


def nothing_fulfils(
    rule: Rule,
    index: int,
    planned: Sequence[Matched],
    closed: core.ClosedJaxpr,
) -> str:
    """Returns the message about a rule whose conditions no contraction meets.

    Args:
        rule: the rule.
        index: its index.
        planned: the contractions of the program.
        closed: the program.
    """
    return _nearest(rule, index, planned) + _not_called(rule, closed)


def _nearest(rule: Rule, index: int, planned: Sequence[Matched]) -> str:
    conditions = overshadowed.conditions(rule, "any contraction")
    text = f"rule {index} ({conditions}) matches nothing"
    if not planned:
        return f"{text}: {NO_CONTRACTIONS}. {_OPTIONAL}"
    by_path = {one.path: one for one in planned}
    alike = difflib.get_close_matches(rule.path, by_path, n=len(by_path), cutoff=0.0)
    missing = {path: _unfulfilled(one, rule) for path, one in by_path.items()}
    nearest = sorted(alike, key=lambda path: len(missing[path]))[:5]
    lines = [f"  {errors.label(path)}: {', '.join(missing[path])}" for path in nearest]
    kinds = {kind for one in planned for kind in (one.lhs.kind, one.rhs.kind)}
    if rule.operands == "weight" and "weight" not in kinds:
        lines.append(
            "No operand is a weight: params= says which arguments are parameters, and "
            "what a function closes over is a constant."
        )
    return "\n".join(
        [
            f"{text}. The nearest of {len(planned)} contractions, and what does not "
            "match:",
            *lines,
            "A path is matched as a whole: write .* for any text before or after. "
            + _OPTIONAL,
        ]
    )


def _not_called(rule: Rule, closed: core.ClosedJaxpr) -> str:
    """Returns a hint if a program does not call the operations that a rule names."""
    called = equations.called_names(closed)
    missing = (
        {*_ops(rule)} - called - {*registry.OF_PRIMITIVES.values(), registry.LOOKUP}
    )
    if not missing:
        return ""
    return (
        f"\nThe program does not call {', '.join(sorted(missing))}. What it calls by a "
        f"name: {', '.join(sorted(called)) or 'nothing'}."
    )
