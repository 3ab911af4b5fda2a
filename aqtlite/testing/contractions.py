"""The contractions among the equations of two runs."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import primitives

from aqtlite.contraction import differentiation, remat
from aqtlite.jaxpr import registry
from aqtlite.jaxpr.replacement import Location
from aqtlite.program import injected
from aqtlite.program.plan_table import NO_SCOPE
from aqtlite.program.planned import equation_of
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

    number: int
    """Its number among all contractions, from 1."""

    kind: str
    """"quantized", or the equation or operation of a float contraction."""

    operands: tuple[Operand, ...]
    begins: int
    """Index of its first equation."""

    ends: int
    """Index of the equation with the sums of products."""

    loops: tuple[int, ...]

    def __str__(self) -> str:
        # Without a name, as in NNX, the order in the program tells it from others.
        name = repr(self.path) if self.path else f"number {self.number} {NO_SCOPE}"
        return f"{name} ({self.kind}){_in_loops(self.loops)}"


def find(steps: Sequence[Step]) -> Iterator[Contraction]:
    """Yields the contractions among equations, in program order."""
    numbers: dict[str, dict[Location, int]] = {}
    begins: int | None = None
    named: dict[str, Step] = {}
    for index, step in enumerate(steps):
        path, is_quantized = _path(step)
        if is_quantized and begins is None:
            begins, named = index, {}
        if not is_quantized:
            begins = None
            if step.eqn.primitive.name in registry.OF_PRIMITIVES:
                yield Contraction(
                    _numbered(path, step, numbers),
                    sum(map(len, numbers.values())),
                    _kind(step.eqn),
                    _operands(step),
                    index,
                    index,
                    step.loops,
                )
        elif step.eqn.primitive is primitives.name_p:
            name = step.eqn.params["name"]
            named.setdefault(name, step)
            if name == remat.SUMS and begins is not None:
                operands = tuple(
                    one
                    for names in (
                        ("lhs", remat.LHS, remat.LHS_SCALE),
                        ("rhs", remat.RHS, remat.RHS_SCALE),
                    )
                    for one in _quantized(named, *names)
                )
                yield Contraction(
                    _numbered(path, step, numbers),
                    sum(map(len, numbers.values())),
                    "quantized",
                    operands,
                    begins,
                    index,
                    step.loops,
                )
                begins = None


def shown(step: Step) -> str:
    """Returns the path of an equation, and the steps of the loops around it."""
    path, _ = _path(step)
    return (repr(path) if path else NO_SCOPE) + _in_loops(step.loops)


def _path(step: Step) -> tuple[str, bool]:
    """Returns the path in plans, and whether it is of a quantized contraction."""
    path = injected.without_mark(step.path)
    names = path.split("/")
    if differentiation.SCOPE not in names:
        return path, False
    return "/".join(names[: names.index(differentiation.SCOPE)]), True


def _numbered(path: str, step: Step, numbers: dict[str, dict[Location, int]]) -> str:
    of_path = numbers.setdefault(path, {})
    number = of_path.setdefault(step.location, len(of_path))
    return f"{path}#{number}" if number else path


def _kind(eqn: Any) -> str:
    return equation_of(eqn) or registry.OF_PRIMITIVES[eqn.primitive.name]


def _operands(step: Step) -> tuple[Operand, ...]:
    return tuple(
        Operand(side, type_of(atom.aval), number)
        for side, atom, number in zip(
            ("lhs", "rhs"), step.eqn.invars, step.inputs, strict=False
        )
    )


def _quantized(
    named: dict[str, Step], side: str, values: str, scales: str
) -> Iterator[Operand]:
    """Yields the operand of a side, if it is quantized."""
    if values in named and scales in named:
        steps = named[values], named[scales]
        types = [type_of(step.eqn.outvars[0].aval) for step in steps]
        numbers = [step.outputs[0] for step in steps]
        yield Operand(side, types[0], numbers[0], numbers[1], types[1])


def _in_loops(loops: tuple[int, ...]) -> str:
    return "".join(f", step {number} of a loop" for number in loops)
