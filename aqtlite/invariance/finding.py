"""Finds the operations of a program that have forms of their own, or need one."""

import collections
import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from aqtlite.contraction.differentiation import SCOPE
from aqtlite.invariance import rules
from aqtlite.jaxpr import equations, registry, rewriting, scopes
from aqtlite.jaxpr.replacement import Location, Replacement


@dataclasses.dataclass(frozen=True)
class Forms:
    """The forms of a program's operations."""

    replacements: Mapping[Location, Replacement] = dataclasses.field(repr=False)
    """Replacements of equations, by location."""

    counts: Mapping[str, int]
    """Number of operations with a form of their own, by the name of the primitive."""

    refused: tuple[str, ...] = ()
    """Operations without such a form: name scope, and why."""

    def check(self) -> None:
        """Raises ValueError if an operation has no such form."""
        if self.refused:
            raise ValueError(
                "operations whose bits depend on more than values:\n  "
                + "\n  ".join(self.refused)
            )

    def __str__(self) -> str:
        ordered = sorted(self.counts.items(), key=lambda one: (-one[1], one[0]))
        text = ", ".join(f"{count} {name}" for name, count in ordered)
        lines = [
            f"Invariant: {sum(self.counts.values())} operations in forms of their own "
            f"({text or 'none'})"
        ]
        over_devices = sorted(self.counts.keys() & rules.OVER_DEVICES)
        if over_devices:
            names = ", ".join(over_devices)
            lines.append(f"depends on the number of devices: {names}")
        return "\n  ".join([*lines, *(f"refused: {one}" for one in self.refused)])


def find(closed: core.ClosedJaxpr, others: Collection[Location] = ()) -> Forms:
    """Finds the forms of a program's operations.

    Args:
        closed: the program.
        others: locations of equations that are replaced by something else.
    """
    replacements: dict[Location, Replacement] = {}
    counts: collections.Counter[str] = collections.Counter()
    refused = []
    for one in _equations(closed, _Place((), "", 0), frozenset(others)):
        try:
            rule = rules.rule_of(one.eqn)
            if rule is not None and one.place.is_in_condition:
                raise rules.NoForm(
                    f"{one.eqn.primitive.name} in the condition of a while loop has no "
                    "such form: compute it in the body, and carry the result"
                )
        except rules.NoForm as error:
            path = scopes.parse(one.scope).path or "(no scope)"
            refused.append(f"{path}: {error}")
            continue
        if rule is not None and not one.is_rounded_already:
            counts[one.eqn.primitive.name] += 1
            replacements[one.location] = Replacement(
                functools.partial(_evaluated, rule, one.eqn),
                per_step=(False,) * one.place.num_scans,
            )
    return Forms(replacements, counts, tuple(dict.fromkeys(refused)))


def _evaluated(
    rule: rules.Rule, eqn: Any, values: Sequence[Any], given: Any
) -> tuple[list[jax.Array], None]:
    del given
    return rules.apply(rule, eqn, values), None


_ROUNDED_IN_CONTRACTIONS = frozenset(
    {"add", "add_any", "convert_element_type", "div", "integer_pow", "mul", "square"}
    | {"sqrt", "sub"}
)
"""Primitives that a quantized contraction calls in forms of its own."""


class _Place(NamedTuple):
    """Where a jaxpr is in a program."""

    location: Location
    scope: str
    num_scans: int
    is_in_condition: bool = False


class _Equation(NamedTuple):
    """An equation that is no call, loop or branch."""

    eqn: Any
    location: Location
    scope: str
    place: _Place

    @property
    def is_rounded_already(self) -> bool:
        """Whether it is part of a quantized contraction, in a form with one result."""
        is_known = self.eqn.primitive.name in _ROUNDED_IN_CONTRACTIONS
        return is_known and SCOPE in scopes.parse(self.scope).path.split("/")


def _equations(
    closed: core.ClosedJaxpr, place: _Place, others: frozenset[Location]
) -> Iterator[_Equation]:
    for number, eqn in enumerate(closed.jaxpr.eqns):
        scope = scopes.join(place.scope, scopes.text_of(eqn))
        bodies = _bodies(eqn)
        location = (*place.location, (number, 0))
        if location in others:
            continue
        if not bodies:
            yield _Equation(eqn, location, scope, place)
        kind = equations.kind_of(eqn)
        for index, body in enumerate(bodies):
            inside = _Place(
                (*place.location, (number, index)),
                scope,
                place.num_scans + (kind in ("scan", "vmap")),
                place.is_in_condition or (kind == "while" and index == 0),
            )
            yield from _equations(body, inside, others)


def _bodies(eqn: Any) -> list[core.ClosedJaxpr]:
    """Returns the bodies of an equation whose equations can be replaced."""
    name = registry.name_of(eqn)
    if name is not None:
        return [registry.body_of(eqn, name)]
    return list(equations.bodies(eqn)) if rewriting.enters(eqn) else []
