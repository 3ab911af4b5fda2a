"""Finds the contractions and named values of a jaxpr, with their dependencies.

Values other than operands of contractions are found by a name from `with_name`, which
computes nothing.
"""

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.extend.core import primitives

from aqtlite.jaxpr import (
    analysis,
    body_inputs,
    equation_digests,
    equations,
    marks,
    origins,
    registry,
    rewriting,
    scopes,
)
from aqtlite.jaxpr.axes import axis_facts, axis_rules
from aqtlite.jaxpr.axes.axis_facts import Facts
from aqtlite.jaxpr.origins import NOTHING, Loop, Origin, Transposed, digest
from aqtlite.jaxpr.replacement import Location
from aqtlite.lowering import target

_PREFIX = "aqtlite value "
_NAMES = registry.OF_PRIMITIVES

# Equations that say on which devices a value lies.
_PLACEMENTS = ("reshard", "sharding_constraint")


def with_name(x: jax.Array, name: str) -> jax.Array:
    """Returns a value with a name that does not affect its `Origin`."""
    named: jax.Array = checkpoint_name(x, _PREFIX + name)
    return named


@dataclasses.dataclass(frozen=True)
class Site:
    """A contraction in a jaxpr, or another equation that `find` looks for."""

    location: Location
    eqn: Any = dataclasses.field(repr=False)
    scope: scopes.Scope
    operands: tuple[Origin, ...]
    """Origins of lhs and rhs; of all inputs, if it is no contraction."""

    around: tuple[str, ...]
    """Names of the primitives around the contraction, outermost first."""

    per_step: tuple[bool, ...] = ()
    """For each scan around it, outermost first, whether every step has its own
    parameters. Mapped calls of a mark count as scans, whose steps run at once."""

    lengths: tuple[int, ...] = ()
    """Lengths of these scans, outermost first."""

    obstacle: str | None = None
    """Reason why it cannot be replaced, if any."""

    registered: str | None = None
    """Name of the registered operation that contains it, if any."""

    mark: marks.Mark | None = None
    """The mark of the call that contains it, if any."""

    @property
    def operation(self) -> str:
        """Name of the function of `jax.lax` that made it."""
        return registry.OF_PRIMITIVES[self.eqn.primitive.name]

    @property
    def signature(self) -> tuple[list[str], list[tuple[str, str]]]:
        """The types of its inputs and its parameters, as text, alike in any process."""
        inputs = [atom.aval.str_short() for atom in self.eqn.invars]
        params = sorted((name, str(value)) for name, value in self.eqn.params.items())
        return inputs, params

    def untransposed(self, index: int) -> Transposed | None:
        """Returns `Origin.untransposed` of an operand."""
        return self.operands[index].untransposed(len(self.eqn.invars[index].aval.shape))


class NamedValue(NamedTuple):
    """A named value of a jaxpr."""

    name: str
    """Name from `with_name`, or from `jax.ad_checkpoint.checkpoint_name`."""

    location: Location
    """Location of the equation that gives the name."""

    origin: Origin
    is_in_branch: bool
    """Whether it cannot leave its body: a branch, a while loop, a `shard_map`, or the
    body of another equation that cannot be rewritten."""


class Found(NamedTuple):
    """The contents of a jaxpr and of all bodies in it, in program order."""

    contractions: list[Site]
    named: list[NamedValue]


def find(
    closed: core.ClosedJaxpr,
    parameters: Mapping[int, str] = MappingProxyType({}),
    names: Collection[str] = registry.OF_PRIMITIVES,
) -> Found:
    """Returns the contractions and the named values of a jaxpr.

    Args:
        closed: the jaxpr.
        parameters: names of the inputs that are parameters, by index.
        names: names of the primitives to return; by default, those of contractions.
    """
    inputs = [
        Origin(
            frozenset({i}),
            digest("parameter", parameters[i]) if i in parameters else None,
            axis_facts.of_input(i, len(aval.shape), is_parameter=i in parameters),
        )
        for i, aval in enumerate(closed.in_avals)
    ]
    found = Found([], [])
    walk(closed, inputs, Place(frozenset(parameters), frozenset(names)), found)
    return found


@dataclasses.dataclass(frozen=True)
class Place:
    """Place of a jaxpr inside the outermost one."""

    parameters: frozenset[int]
    primitives: frozenset[str]
    """Names of the primitives to find."""

    location: Location = ()
    scope: str = ""
    around: tuple[str, ...] = ()
    per_step: tuple[bool, ...] = ()
    lengths: tuple[int, ...] = ()
    obstacle: str | None = None
    registered: str | None = None
    mark: marks.Mark | None = None

    def inside(
        self, eqn: Any, values: Sequence[Origin], index: int, body: int
    ) -> "Place":
        """Returns the place of a body of an equation; `values` are input origins."""
        name = equations.kind_of(eqn)
        obstacle = self.obstacle
        if not rewriting.enters(eqn):
            obstacle = f"it is inside of {name}, which stays as it is"
        elif name == "while" and body == 0:
            obstacle = "it is in the condition of a while loop"
        per_step, lengths = self.per_step, self.lengths
        if name == "scan":
            scan = equations.Scan.of(eqn)
            *_, scanned = scan.of_inputs(values)
            lengths = (*lengths, scan.length)
            per_step = (*per_step, any(map(self._is_of_parameters, scanned)))
        mapped = marks.mapped_call(eqn)
        if mapped is not None:
            lengths = (*lengths, mapped.length)
            sliced = itertools.compress(values, mapped.is_mapped)
            per_step = (*per_step, any(map(self._is_of_parameters, sliced)))
        return dataclasses.replace(
            self,
            location=(*self.location, (index, body)),
            scope=self.scope_of(eqn),
            around=(*self.around, name),
            per_step=per_step,
            lengths=lengths,
            obstacle=obstacle,
            mark=marks.mark_of(eqn) or self.mark,
        )

    def inside_registered(self, eqn: Any, name: str, index: int) -> "Place":
        """Returns the place of the reference of a registered operation."""
        return dataclasses.replace(
            self,
            location=(*self.location, (index, 0)),
            scope=self.scope_of(eqn),
            registered=name,
        )

    @property
    def is_in_branch(self) -> bool:
        """Whether values cannot leave the place."""
        is_branch = {"cond", "while", "shard_map"}.intersection(self.around)
        return bool(is_branch) or self.obstacle is not None

    def scope_of(self, eqn: Any) -> str:
        """Returns the scope of an equation, as JAX writes it."""
        return scopes.join(self.scope, scopes.text_of(eqn))

    def _is_of_parameters(self, value: Origin) -> bool:
        """Whether a value depends on parameters and no other inputs."""
        inputs = {one for one in value.needed if not isinstance(one, Loop)}
        return bool(inputs) and inputs <= self.parameters


def walk(
    closed: core.ClosedJaxpr,
    inputs: Sequence[Origin],
    place: Place,
    found: Found,
) -> list[Origin]:
    """Adds the contents of a jaxpr.

    Args:
        closed: the jaxpr.
        inputs: origins of its inputs.
        place: where it is.
        found: what was found, to which its contents are added.

    Returns:
        Origins of its outputs.
    """
    jaxpr = closed.jaxpr
    known = {
        var: origins.of_constant(value)
        for var, value in zip(jaxpr.constvars, closed.consts, strict=True)
    }
    known.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Origin:
        if isinstance(atom, core.Literal):
            return origins.of_constant(equations.literal_value(atom))
        return known[atom]

    for index, eqn in enumerate(jaxpr.eqns):
        values = [read(atom) for atom in eqn.invars]
        location = (*place.location, (index, 0))
        if eqn.primitive is primitives.name_p:
            name = str(eqn.params["name"]).removeprefix(_PREFIX)
            found.named.append(
                NamedValue(name, location, values[0], place.is_in_branch)
            )
        if eqn.primitive.name in place.primitives:
            found.contractions.append(
                Site(
                    location,
                    eqn,
                    scopes.parse(place.scope_of(eqn)),
                    tuple(values[:2] if eqn.primitive.name in _NAMES else values),
                    place.around,
                    place.per_step,
                    place.lengths,
                    place.obstacle,
                    place.registered,
                    place.mark,
                )
            )
        outputs = _inside(eqn, index, values, place, found)
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _inside(
    eqn: Any, index: int, values: list[Origin], place: Place, found: Found
) -> list[Origin]:
    """Adds the contractions inside an equation; returns origins of the outputs."""
    name = registry.name_of(eqn)
    if name is not None:
        scope = scopes.parse(place.scope_of(eqn))
        # Calls in a gradient have the same name, but other inputs and outputs.
        if not scope.is_of_gradient:
            is_mapped = "vmap" in scope.transformations
            body = registry.checked_body(eqn, name, is_mapped=is_mapped)
            there = place.inside_registered(eqn, name, index)
            return walk(body, values, there, found)
    of_bodies = []
    for number, body in enumerate(equations.bodies(eqn)):
        inner = body_inputs.of(eqn, number, body, values, depth=len(place.lengths))
        there = place.inside(eqn, values, index, number)
        of_bodies.append(walk(body, inner, there, found))
    is_call = equations.called_body(eqn) is not None
    return of_bodies[0] if is_call else _outputs(eqn, values, of_bodies)


def _outputs(
    eqn: Any, values: list[Origin], of_bodies: Sequence[Sequence[Origin]]
) -> list[Origin]:
    """Returns the origins of the outputs of an equation that is not a call."""
    if eqn.primitive is primitives.name_p and eqn.params["name"].startswith(_PREFIX):
        return values
    made, former = equation_digests.identities(eqn, values)
    if eqn.primitive.name in _PLACEMENTS:
        # Calls on other devices, and of a frozen weight, do not have it.
        return [values[0]._replace(former=former and digest(former, "0"))]
    facts = _facts_of_outputs(eqn, [value.facts for value in values], of_bodies)
    transposed = origins.transposed(eqn, values[0]) if made and values else None
    return [
        Origin(
            NOTHING.union(*(values[i].needed for i in needed)),
            made and digest(made, str(number)),
            facts[number],
            transposed,
            former and digest(former, str(number)),
        )
        for number, needed in enumerate(analysis.equation_dependencies(eqn))
    ]


def _facts_of_outputs(
    eqn: Any, inputs: list[Facts], of_bodies: Sequence[Sequence[Origin]]
) -> list[Facts]:
    """Returns the facts about the outputs of an equation that is not a call."""
    if eqn.primitive is primitives.scan_p:
        scan = equations.Scan.of(eqn)
        carry, steps = scan.of_outputs([one.facts for one in of_bodies[0]])
        *_, scanned = scan.of_inputs(inputs)
        leading = axis_facts.joined_axis([facts.axes[0] for facts in scanned])
        stacks = (one._replace(axes=(leading, *one.axes)) for one in steps)
        return [*map(axis_facts.without_masks, carry), *stacks]
    ranks = [len(var.aval.shape) for var in eqn.outvars]
    # A loop's condition has another number of outputs than the loop.
    alike = [
        [one.facts for one in outputs]
        for outputs in of_bodies
        if [len(one.facts.axes) for one in outputs] == ranks
    ]
    if alike:
        return [axis_facts.joined(facts) for facts in zip(*alike, strict=True)]
    reference = target.reference_of(eqn)
    if reference is not None:
        given, place = (
            [Origin(facts=x) for x in inputs],
            Place(frozenset(), frozenset()),
        )
        return [x.facts for x in walk(reference, given, place, Found([], []))]
    return axis_rules.of_outputs(eqn, inputs)
