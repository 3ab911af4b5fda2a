"""The contractions among the equations of two runs."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import primitives

from aqtlite import errors
from aqtlite.contraction import differentiation, remat
from aqtlite.jaxpr import module_scopes, registry
from aqtlite.program.equation import equation_of
from aqtlite.program.naming import numbered
from aqtlite.shapes.sharding import describe as type_of
from aqtlite.testing.two_runs import Step


@dataclasses.dataclass(frozen=True)
class Operand:
    """An operand of a contraction."""

    side: str
    type: str
    values: int | None
    """Number of its values, stored ones if it is quantized; None if they are equal in
    both runs."""

    scales: int | None = None
    """Number of its scales; None if there are none, or if they are equal."""

    type_of_scales: str = ""


@dataclasses.dataclass(frozen=True)
class Contraction:
    """A contraction, quantized or not."""

    path: str
    """Its path, as plans write it."""

    kind: str
    """"quantized", or the equation or operation of a float contraction."""

    operands: tuple[Operand, ...]
    begins: int
    """Index of its first equation."""

    ends: int
    """Index of the equation with the sums of products."""

    step: Step
    """The equation with the sums of products."""

    def __str__(self) -> str:
        name = errors.quoted(self.path)
        return f"{name} ({self.kind}){_in_loops(self.step.loops)}"


def find(
    steps: Sequence[Step], paths: Sequence[str] | None = None
) -> list[Contraction]:
    """Returns the contractions among equations, in program order.

    Args:
        steps: the equations.
        paths: paths of all contractions of the program, if scopes do not name them.
            They count if there are as many of them.
    """
    found = list(_unnamed(steps))
    scopes = {one.step.location: one.path for one in found}
    if paths is None or len(paths) != len(scopes):
        paths = numbered(list(scopes.values()))
    path_of = dict(zip(scopes, paths, strict=True))
    return [dataclasses.replace(one, path=path_of[one.step.location]) for one in found]


def _unnamed(steps: Sequence[Step]) -> Iterator[Contraction]:
    """Yields contractions with their scopes as paths."""
    begins: int | None = None
    named: dict[str, Step] = {}
    for index, step in enumerate(steps):
        scope, is_quantized = _scope(step)
        if not is_quantized:
            begins = None
            if step.eqn.primitive.name in registry.OF_PRIMITIVES:
                kind = _kind(step.eqn)
                yield Contraction(scope, kind, _operands(step), index, index, step)
            continue
        if begins is None:
            begins, named = index, {}
        if step.eqn.primitive is primitives.name_p:
            named.setdefault(step.eqn.params["name"], step)
            if remat.SUMS in named:
                operands = tuple(_quantized(named))
                yield Contraction(scope, "quantized", operands, begins, index, step)
                begins = None


def shown(step: Step) -> str:
    """Returns the path of an equation, and the steps of the loops around it."""
    path, _ = _scope(step)
    return errors.quoted(path) + _in_loops(step.loops)


def _scope(step: Step) -> tuple[str, bool]:
    """Returns the scope in plans, and whether it is of a quantized contraction."""
    path = module_scopes.resolved(step.path).path
    names = path.split("/")
    if differentiation.SCOPE not in names:
        return path, False
    return "/".join(names[: names.index(differentiation.SCOPE)]), True


def _kind(eqn: Any) -> str:
    return equation_of(eqn) or registry.OF_PRIMITIVES[eqn.primitive.name]


def _operands(step: Step) -> tuple[Operand, ...]:
    return tuple(
        Operand(side, type_of(atom.aval), number)
        for side, atom, number in zip(
            ("lhs", "rhs"), step.eqn.invars, step.inputs, strict=False
        )
    )


def _quantized(named: Mapping[str, Step]) -> Iterator[Operand]:
    """Yields the quantized operands of a contraction, from the values it names."""
    for side, values, scales in (
        ("lhs", remat.LHS, remat.LHS_SCALE),
        ("rhs", remat.RHS, remat.RHS_SCALE),
    ):
        if values in named:
            steps = named[values], named[scales]
            types = [type_of(step.eqn.outvars[0].aval) for step in steps]
            numbers = [step.outputs[0] for step in steps]
            yield Operand(side, types[0], numbers[0], numbers[1], types[1])


def _in_loops(loops: tuple[int, ...]) -> str:
    return "".join(f", step {number} of a loop" for number in loops)
