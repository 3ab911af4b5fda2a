"""Name scopes of equations, from `jax.named_scope` and Flax modules."""

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
