"""The dependencies of values, and digests of how they are computed."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import primitives

from aqtlite.jaxpr.axes import axis_facts
from aqtlite.jaxpr.axes.axis_facts import Facts
from aqtlite.shapes import processes


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop around a contraction, as a dependency of values in its body."""

    depth: int
    """Number of scans around the loop."""

    is_carried: bool
    """Whether the value depends on the carry of the loop. Otherwise it depends on the
    slice of an array that each step has."""


Dependency = int | Loop
"""The index of an input of the jaxpr, or a loop."""

Dependencies = frozenset[Dependency]

NOTHING: Dependencies = frozenset()
"""The dependencies of a constant."""

_NO_FACTS = Facts(())


class Origin(NamedTuple):
    """The dependencies of a value, and a digest of its computation."""

    needed: Dependencies = NOTHING
    """Inputs and loops that the value depends on."""

    identity: str | None = None
    """Digest of the computation, if the value depends only on parameters and constants:
    equal computations from equal parameters have equal digests anywhere in the jaxpr.
    """

    facts: Facts = _NO_FACTS
    """Facts about its axes."""

    transposed: "Transposed | None" = None
    """The value that it is a transposition of, or reversed; None if no equation
    transposes or reverses it."""

    former: str | None = None
    """The identity that weights were stored with before
    `equation_digests` listed parameters; None if that is `identity`."""

    @property
    def known_as(self) -> tuple[str, ...]:
        """The identities by which a stored weight may know it."""
        return tuple(one for one in (self.identity, self.former) if one is not None)

    @property
    def inputs(self) -> frozenset[int]:
        """Indices of the inputs that the value depends on."""
        return frozenset(one for one in self.needed if isinstance(one, int))

    def untransposed(self, ndim: int) -> "Transposed | None":
        """Returns the value and the permutation of axes that give it.

        Args:
            ndim: its number of axes.

        Returns:
            The innermost value that is not transposed; None without an identity.
        """
        if self.identity is None or self.transposed is not None:
            return self.transposed
        return Transposed(self.identity, tuple(range(ndim)))


class Transposed(NamedTuple):
    """A value with its axes in another order."""

    identity: str
    """Identity of the value before the transposition; of the same elements in the
    opposite order along some axes, however it was reversed."""

    permutation: tuple[int, ...]
    """Its axes, in the order of the transposed value."""

    backwards: frozenset[int] = frozenset()
    """Its axes along which it was reversed."""

    forwards: str = ""
    """Identity of the value before it was reversed; empty if it was not."""

    def transpose(self, permutation: Sequence[int]) -> "Transposed":
        """Returns the value with its axes in a further order."""
        axes = tuple(self.permutation[axis] for axis in permutation)
        return self._replace(permutation=axes)

    def reverse(self, dimensions: Sequence[int]) -> "Transposed":
        """Returns the value reversed along axes of the transposed one."""
        axes = {self.permutation[axis] for axis in dimensions}
        backwards, forwards = self.backwards ^ axes, self.forwards or self.identity
        identity = forwards
        if backwards:
            identity = digest("reversed", forwards, *map(str, sorted(backwards)))
        return Transposed(identity, self.permutation, backwards, forwards)


def transposed(eqn: Any, value: Origin) -> Transposed | None:
    """Returns what a transposition or a reversal of a value is of; None otherwise."""
    if eqn.primitive not in (primitives.transpose_p, primitives.rev_p):
        return None
    before = value.untransposed(len(eqn.outvars[0].aval.shape))
    if before is None:
        return None
    if eqn.primitive is primitives.rev_p:
        return before.reverse(eqn.params["dimensions"])
    return before.transpose(eqn.params["permutation"])


def of_constant(value: Any) -> Origin:
    """Returns the origin of a literal, or of a constant of a jaxpr."""
    return Origin(identity=_digest_of(value), facts=axis_facts.of_constant(value))


def digest(*parts: str) -> str:
    """Returns a digest of strings."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _digest_of(value: Any) -> str | None:
    if not processes.is_readable(value):
        return None
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        kind, value = str(value.dtype), jax.random.key_data(value)
        return digest("key", kind, _digest_of(value) or "")
    array = np.asarray(value)
    content = hashlib.sha256(array.tobytes()).hexdigest()
    return digest("constant", str(array.dtype), str(array.shape), content)
