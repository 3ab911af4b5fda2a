"""Dependency analysis: the inputs of a jaxpr that a value depends on.

An output of `while` or `cond` is taken to depend on every input of it, which errs on
the safe side. A value of interest inside a jaxpr, wherever it is, is found again by the
name that `jax.ad_checkpoint.checkpoint_name` gave it, which computes nothing.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

from jax.extend import core
from jax.extend.core import primitives

from aqtlite.jaxpr import analysis, equations

Dependencies = frozenset[int]
"""Indices of inputs."""

_NOTHING: Dependencies = frozenset()


@dataclasses.dataclass(frozen=True)
class NamedValue:
    """A value of a jaxpr that has a name."""

    dependencies: Dependencies
    is_in_branch: bool
    """It is inside a branch, a loop other than a scan, or a shard."""


def output_dependencies(
    closed: core.ClosedJaxpr, without: Collection[str] = ()
) -> list[Dependencies]:
    """Returns, for each output, the inputs that its value depends on.

    Args:
        closed: the jaxpr.
        without: names of values that are taken to depend on nothing.
    """
    return _analyze_all(closed.jaxpr, _Dependencies(frozenset(without)))


def named_values(closed: core.ClosedJaxpr) -> dict[str, NamedValue]:
    """Returns the named values of a jaxpr, by name."""
    collecting = _NamedDependencies()
    _analyze_all(closed.jaxpr, collecting)
    return collecting.found


def occurrences(closed: core.ClosedJaxpr, name: str) -> list[NamedValue]:
    """Returns the values of a jaxpr that have a name, each by itself."""
    collecting = _Occurrences()
    _analyze_all(closed.jaxpr, collecting)
    return [
        value
        for key, value in collecting.found.items()
        if key.rpartition(" ")[0] == name
    ]


def equation_dependencies(eqn: Any) -> list[Dependencies]:
    """Returns, for each output of an equation, the inputs that it depends on."""
    inputs = [frozenset({i}) for i in range(len(eqn.invars))]
    return analysis.analyze_equation(eqn, inputs, _Dependencies())


def _analyze_all(jaxpr: Any, rules: "_Dependencies") -> list[Dependencies]:
    inputs = [frozenset({i}) for i in range(len(jaxpr.invars))]
    return analysis.analyze(jaxpr, inputs, rules)


class _Dependencies(analysis.Analysis[Dependencies]):
    def __init__(self, without: frozenset[str] = frozenset()):
        self._without = without

    def constant(self, aval: Any) -> Dependencies:
        del aval
        return _NOTHING

    def join(self, first: Dependencies, second: Dependencies) -> Dependencies:
        return first | second

    def equation(self, eqn: Any, inputs: list[Dependencies]) -> list[Dependencies]:
        if eqn.primitive is primitives.name_p:
            is_cut = eqn.params["name"] in self._without
            return [_NOTHING if is_cut else inputs[0]]
        return [_NOTHING.union(*inputs)] * len(eqn.outvars)


class _NamedDependencies(_Dependencies):
    """Collects the named values on the way."""

    def __init__(self, is_in_branch: bool = False):
        super().__init__()
        self.found: dict[str, NamedValue] = {}
        self._is_in_branch = is_in_branch

    def equation(self, eqn: Any, inputs: list[Dependencies]) -> list[Dependencies]:
        if eqn.primitive is primitives.name_p:
            self._add(self._key(eqn), inputs[0], self._is_in_branch)
        else:
            self._collect_inside(eqn, inputs)
        return super().equation(eqn, inputs)

    def _key(self, eqn: Any) -> str:
        return str(eqn.params["name"])

    def _add(self, name: str, dependencies: Dependencies, is_in_branch: bool) -> None:
        before = self.found.get(name, NamedValue(_NOTHING, False))
        self.found[name] = NamedValue(
            before.dependencies | dependencies, before.is_in_branch or is_in_branch
        )

    def _collect_inside(self, eqn: Any, inputs: list[Dependencies]) -> None:
        """Collects the names in branches, loops, and shards."""
        everything = _NOTHING.union(*inputs)
        inside = type(self)(is_in_branch=True)
        for number, body in enumerate(equations.bodies(eqn)):
            if eqn.primitive is primitives.cond_p:
                facts = inputs[1:]
            elif eqn.primitive is primitives.while_p:
                if number == 0:
                    continue
                _, facts, start = equations.While.of(eqn).of_inputs(inputs)
                facts += [everything] * len(start)
            elif eqn.primitive.name == "shard_map":
                facts = inputs
            else:
                facts = [everything] * len(body.jaxpr.invars)
            analysis.analyze(body.jaxpr, facts, inside)
        for name, value in inside.found.items():
            self._add(name, value.dependencies, True)


class _Occurrences(_NamedDependencies):
    """Collects them by the equations that give the names."""

    def _key(self, eqn: Any) -> str:
        return f"{eqn.params['name']} {id(eqn)}"
