"""Name scopes of equations, from `jax.named_scope` and Flax modules."""

import itertools
import re
from typing import Any, NamedTuple

from jax.extend import core

from aqtlite.jaxpr import equations

_WRAPPER = re.compile(r"([A-Za-z_]\w*)\(")


class Scope(NamedTuple):
    """The scope of an equation.

    >>> parse("Model/transpose(jvp(Block_0))/Dense_0")
    Scope(path='Model/Block_0/Dense_0', transformations=('transpose', 'jvp'))
    """

    path: str
    """Names joined by slashes, outermost first."""

    transformations: tuple[str, ...]
    """Transformations that JAX wrote around some of the names."""

    @property
    def is_of_gradient(self) -> bool:
        """Whether the scope is of a gradient that the program itself computes."""
        return bool({"jvp", "transpose"} & set(self.transformations))


def text_of(eqn: Any) -> str:
    """Returns the scope of an equation inside its own jaxpr, as JAX writes it.

    It is only available from the `source_info` of an equation. Should JAX remove that,
    paths of contractions are empty, and the tests of this file fail.
    """
    return str(eqn.source_info.name_stack)


def relative(jaxpr: Any) -> tuple[str, Any]:
    """Takes the scope that all equations of a jaxpr share off their own scopes.

    Like `text_of`, this reads the `source_info` of equations.

    Returns:
        The shared scope, and the jaxpr with scopes relative to it. The shared scope is
        empty if the scopes cannot be put together again.
    """
    stacks = [eqn.source_info.name_stack for eqn in jaxpr.eqns]
    columns = zip(*(stack.stack for stack in stacks), strict=False)
    count = sum(1 for _ in itertools.takewhile(lambda one: len({*one}) == 1, columns))
    if not count:
        return "", jaxpr
    shared, rests = str(stacks[0][:count]), [stack[count:] for stack in stacks]
    if any(
        join(shared, str(rest)) != str(stack)
        for rest, stack in zip(rests, stacks, strict=True)
    ):
        return "", jaxpr
    eqns = [
        eqn.replace(source_info=eqn.source_info.replace(name_stack=rest))
        for eqn, rest in zip(jaxpr.eqns, rests, strict=True)
    ]
    return shared, jaxpr.replace(eqns=eqns)


def join(outer: str, inner: str) -> str:
    """Joins the scope of an equation and a scope inside its body.

    >>> join("Model", "Block_0"), join("", "Block_0"), join("Model", "")
    ('Model/Block_0', 'Block_0', 'Model')
    """
    return "/".join(part for part in (outer, inner) if part)


def parse(text: str) -> Scope:
    """Separates the names of a scope from its transformations."""
    transformations = tuple(_WRAPPER.findall(text))
    names = _WRAPPER.sub("", text).replace(")", "") if transformations else text
    return Scope("/".join(filter(None, names.split("/"))), transformations)


def occurs(name: str, closed: core.ClosedJaxpr) -> bool:
    """Whether an equation of a jaxpr, or of a body in it, is in a scope."""
    return any(
        name in parse(text_of(eqn)).path.split("/")
        or any(occurs(name, body) for body in equations.bodies(eqn))
        for eqn in closed.jaxpr.eqns
    )
