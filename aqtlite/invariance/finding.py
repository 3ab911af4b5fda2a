"""Finds the operations of a program that have forms of their own, or need one."""

import collections
import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from aqtlite.contraction.differentiation import SCOPE
from aqtlite.invariance import angles, known, rules
from aqtlite.jaxpr import equations, registry, rewriting, scopes
from aqtlite.jaxpr.replacement import Location, Replacement
from aqtlite.lowering import target


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


def find(
    closed: core.ClosedJaxpr, others: Collection[Location] = (), scope: str = ""
) -> Forms:
    """Finds the forms of a program's operations.

    Args:
        closed: the program.
        others: locations of equations that are replaced by something else.
        scope: name scope around the program.
    """
    replacements: dict[Location, Replacement] = {}
    counts: collections.Counter[str] = collections.Counter()
    refused: list[str] = []
    pairs: dict[Any, angles.Pair] = collections.defaultdict(angles.Pair)
    for one in _equations(closed, _Place((), scope, 0), frozenset(others), {}):
        if one.reference is not None and not one.place.is_in_condition:
            inner = find(one.reference, scope=one.scope)
            counts.update(inner.counts)
            refused += inner.refused
            replacements[one.location] = Replacement(
                functools.partial(_by_reference, one.reference, inner),
                per_step=(False,) * one.place.num_scans,
            )
            continue
        try:
            rule = one.rule
            is_float = rule is not None or one.reference is not None
            if is_float and one.place.is_in_condition:
                raise rules.NoForm(
                    f"{one.eqn.primitive.name} in the condition of a while loop has no "
                    "such form: compute it in the body, and carry the result"
                )
        except rules.NoForm as error:
            path = scopes.parse(one.scope).path or "(no scope)"
            refused.append(f"{path}: {error}")
            continue
        if rule is not None and not one.is_rounded_already:
            name = one.eqn.primitive.name
            counts[name] += 1
            if name in angles.PAIR and isinstance(one.eqn.invars[0], core.Var):
                pair = pairs[one.place.location, one.eqn.invars[0]]
                rule = functools.partial(pair, name)
            function = functools.partial(_evaluated, rule, one.eqn)
            if one.results is not None:
                function = functools.partial(_constant, one.results)
            replacements[one.location] = Replacement(
                function,
                per_step=(False,) * one.place.num_scans,
            )
    return Forms(replacements, counts, tuple(dict.fromkeys(refused)))


def _evaluated(
    rule: rules.Rule, eqn: Any, values: Sequence[Any], given: Any
) -> tuple[list[jax.Array], None]:
    del given
    return rules.apply(rule, eqn, values), None


def _by_reference(
    closed: core.ClosedJaxpr, forms: Forms, values: Sequence[Any], given: Any
) -> tuple[list[jax.Array], None]:
    del given
    return rewriting.evaluate(closed, values, forms.replacements)[0], None


def _constant(
    results: Sequence[np.ndarray], values: Sequence[Any], given: Any
) -> tuple[list[jax.Array], None]:
    del values, given
    return [jnp.asarray(x) for x in results], None


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


@dataclasses.dataclass(frozen=True)
class _Equation:
    """An equation that is no call, loop or branch."""

    eqn: Any
    location: Location
    scope: str
    place: _Place
    inputs: Sequence[np.ndarray | None]
    """Values that depend on no input of the program; None for others."""

    @functools.cached_property
    def reference(self) -> core.ClosedJaxpr | None:
        """The reference of a function whose forms add floats in other orders."""
        function = target.function_of(self.eqn)
        if function is None or not function.sums_floats:
            return None
        return target.reference_of(self.eqn)

    @functools.cached_property
    def rule(self) -> rules.Rule | None:
        """The form; None if nothing is rounded. Raises `rules.NoForm`."""
        return rules.rule_of(self.eqn)

    @functools.cached_property
    def results(self) -> list[np.ndarray] | None:
        """The results, if they depend on no input, either, and have a form."""
        values = [x for x in self.inputs if x is not None]
        if len(values) < len(self.inputs) or self.is_rounded_already:
            return None
        try:
            rule = self.rule
        except rules.NoForm:  # `find` says so, and where.
            return None
        return known.results(self.eqn, rule, values)

    @property
    def is_rounded_already(self) -> bool:
        """Whether it is part of a quantized contraction, in a form with one result."""
        is_known = self.eqn.primitive.name in _ROUNDED_IN_CONTRACTIONS
        return is_known and SCOPE in scopes.parse(self.scope).path.split("/")


def _equations(
    closed: core.ClosedJaxpr,
    place: _Place,
    others: frozenset[Location],
    values: dict[Any, np.ndarray | None],
) -> Iterator[_Equation]:
    """Yields the equations.

    Args:
        closed: the program.
        place: where it is.
        others: locations of equations to leave out.
        values: values of variables that depend on no input, to which those of the
            results are added.
    """
    for number, eqn in enumerate(closed.jaxpr.eqns):
        scope = scopes.join(place.scope, scopes.text_of(eqn))
        bodies = _bodies(eqn)
        location = (*place.location, (number, 0))
        if location in others:
            continue
        inputs = [_value(atom, values) for atom in eqn.invars]
        if not bodies:
            one = _Equation(eqn, location, scope, place, inputs)
            yield one
            values.update(zip(eqn.outvars, one.results or (), strict=False))
        kind = equations.kind_of(eqn)
        for index, body in enumerate(bodies):
            inside = _Place(
                (*place.location, (number, index)),
                scope,
                place.num_scans + (kind in ("scan", "vmap")),
                place.is_in_condition or (kind == "while" and index == 0),
            )
            is_call = equations.called_body(eqn) is not None
            of_body: dict[Any, np.ndarray | None] = {}
            if is_call:
                of_body.update(zip(body.jaxpr.invars, inputs, strict=True))
            yield from _equations(body, inside, others, of_body)
            if is_call:
                found = (_value(atom, of_body) for atom in body.jaxpr.outvars)
                values.update(zip(eqn.outvars, found, strict=True))


def _value(atom: Any, values: Mapping[Any, np.ndarray | None]) -> np.ndarray | None:
    """Returns the value of an atom; None where it depends on an input."""
    return known.literal(atom) if isinstance(atom, core.Literal) else values.get(atom)


def _bodies(eqn: Any) -> list[core.ClosedJaxpr]:
    """Returns the bodies of an equation whose equations can be replaced."""
    name = registry.name_of(eqn)
    if name is not None:
        return [registry.body_of(eqn, name)]
    return list(equations.bodies(eqn)) if rewriting.enters(eqn) else []
