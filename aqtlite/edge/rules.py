"""Rules that select the integers of each operator of a full-integer program."""

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any, Literal, get_args

from aqtlite import errors
from aqtlite.program.rules import overshadowed, patterns, rules_json

Activations = Literal["int8", "int16"]
Weights = Literal["int8", "int4", "int2"]


@dataclasses.dataclass(frozen=True)
class Rule:
    """Integers for the operators of a program that match `path` and `op`.

    The first rule that matches an operator applies. Operators that match no rule have
    int8 activations and int8 weights.

    >>> rules = (Rule(path=".*/head", is_float=True), Rule(weights="int4"))

    Raises:
        TypeError: if a field has the wrong type.
        ValueError: if `path` is not a regular expression, or another field has an
            invalid value.
    """

    path: str = ".*"
    """Regular expression that has to match the whole path of an operator: the name
    scopes around it (`jax.named_scope`, Flax module names), joined by slashes."""

    op: str | None = None
    """Name of the operator, such as "fully_connected", "conv_2d" or "softmax", or with
    `is_float` also the name of a JAX primitive. None matches any."""

    activations: Activations = "int8"
    """Dtype of the integers of inputs and output."""

    weights: Weights = "int8"
    """Dtype of the integers of the weight, if any; symmetric and per-channel."""

    is_float: bool = False
    """Whether the operator stays in float."""

    is_required: bool = True
    """Whether it is an error if no operator of a program matches, or if the rule has a
    `path` or an `op`, and earlier rules decide about all that match."""

    def __post_init__(self) -> None:
        for name, options in (("activations", Activations), ("weights", Weights)):
            value, known = getattr(self, name), get_args(options)
            if value not in known:
                raise ValueError(
                    f"edge.Rule.{name} must be one of {', '.join(known)}, got {value!r}"
                )
        if not isinstance(self.path, str):
            raise TypeError(f"edge.Rule.path must be a string, got {self.path!r}")
        if self.op is not None and not isinstance(self.op, str):
            raise TypeError(f"edge.Rule.op must be a string or None, got {self.op!r}")
        for name in ("is_float", "is_required"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(
                    f"edge.Rule.{name} must be a bool, got {getattr(self, name)!r}"
                )
        patterns.check(self.path, "edge.Rule.path")

    def fits(self, path: str, *names: str) -> bool:
        """Whether the rule matches an operator.

        Args:
            path: name scopes around the operator.
            *names: names of the operator.
        """
        has_name = self.op is None or self.op in names
        return has_name and patterns.fullmatch(self.path, path)


def to_json(rules: Sequence[Rule], *, indent: int | None = None) -> str:
    """Writes rules as JSON, including fields with default values.

    >>> rules = (Rule(path=".*/head", is_float=True), Rule(weights="int4"))
    >>> from_json(to_json(rules)) == rules
    True

    Args:
        rules: the rules.
        indent: number of spaces of indentation per level; None for a single line.

    Raises:
        TypeError: if `rules` is not a sequence of rules.
    """
    return rules_json.write([rules_json.fields_of(r) for r in check(rules)], indent)


def from_json(text: str) -> tuple[Rule, ...]:
    """Reads what `to_json` wrote; missing fields take their defaults.

    Raises:
        TypeError: if `text` is not a string.
        ValueError: if it is not JSON, not of version 1, or does not describe rules; the
            message names the place.
    """
    return rules_json.read(text, Rule)


INT8 = Rule()
"""The rule for operators that match no other rule."""


def check(rules: Any) -> tuple[Rule, ...]:
    """Checks rules, and returns them as a tuple.

    Raises:
        TypeError: if `rules` is not a sequence of rules.
    """
    if isinstance(rules, Rule):
        return (rules,)
    if not isinstance(rules, Sequence) or not all(isinstance(r, Rule) for r in rules):
        raise TypeError(
            f"rules must be a sequence of aqtlite.edge.Rule, got {errors.brief(rules)}"
        )
    return tuple(rules)


def of(rules: Sequence[Rule], path: str, *names: str) -> Rule:
    """The first rule that matches an operator, or `INT8`."""
    return next((rule for rule in rules if rule.fits(path, *names)), INT8)


def check_used(rules: Sequence[Rule], operators: Sequence[tuple[str, str]]) -> None:
    """Checks that each required rule has an operator to decide about.

    Args:
        rules: the rules.
        operators: name scopes and name of each operator.

    Raises:
        ValueError: if a required rule matches none (the message lists similar ones), or
            if it names a path or an operator, and earlier rules decide about all that
            it matches.
    """
    fitting = [
        [index for index, rule in enumerate(rules) if rule.fits(*one)]
        for one in operators
    ]
    used = {indices[0] for indices in fitting if indices}
    for index, rule in enumerate(rules):
        if not rule.is_required or index in used:
            continue
        deciding = {indices[0] for indices in fitting if index in indices}
        overshadowed.check(rules, index, deciding, "any operator")
        if not deciding:
            known = sorted({f"{path} {name}".strip() for path, name in operators})
            wanted = f"{rule.path} {rule.op or ''}".strip()
            near = difflib.get_close_matches(wanted, known, 5, 0.0)
            raise ValueError(
                f"rules[{index}], {rule}, fits no operator; the nearest are "
                f"{'; '.join(near)}. Set is_required=False if that is meant"
            )
