"""Contractions that carry configs of their own, which take precedence over rules.

An injected function (`aqtlite.flax.nnx.AqtDotGeneral`) usually quantizes by itself.
Inside a model quantized by rules it contracts floats instead, in a call marked with its
config, so that both kinds share one plan, one state and one conversion. The injected
functions of Linen always quantize by themselves, and mark contractions only for the
plan of a model.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive

from aqtlite import config
from aqtlite.contraction import differentiation
from aqtlite.contraction.contract import Options, contract
from aqtlite.jaxpr.marks import Mark
from aqtlite.jaxpr.sites import Site
from aqtlite.operations import Operation

# A user context is part of JAX's cache keys, so traces with and without it stay apart.
_is_marked = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """Lets injected functions contract floats and mark the contractions."""
    with _is_marked(True):
        yield


def is_marking() -> bool:
    """Whether `marking` is in effect."""
    return bool(_is_marked.value)


@dataclasses.dataclass(frozen=True)
class Injected(Mark):
    """A float contraction to be quantized with a config.

    Mapped by `jax.vmap`, each call has scales of its own, as where the function
    quantizes by itself. Of a calibration with a state there is one for all calls, since
    such a function has no variables: then what is contracted is the whole arrays.
    """

    cfg: config.DotGeneral

    def mapped(self, axes: Sequence[int | None], *args: Any) -> jax.Array:
        if not self.cfg.has_states:
            return super().mapped(axes, *args)
        function = _Mapped(self.function, tuple(axes))
        return dataclasses.replace(self, function=function)(*args)


@dataclasses.dataclass(frozen=True)
class Described(Injected):
    """A contraction that quantizes by itself with a config.

    The program with it is planned, and never evaluated.
    """

    def tangent(
        self, out: jax.Array, args: Sequence[Any], tangents: Sequence[Any]
    ) -> jax.Array:
        # As in the program that quantizes, plans leave out gradients of contractions.
        with jax.named_scope(differentiation.SCOPE):
            return super().tangent(out, args, tangents)


def config_of(site: Site) -> config.DotGeneral | None:
    """Returns the config of the mark around a contraction or lookup, or None."""
    return site.mark.cfg if isinstance(site.mark, Injected) else None


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """A function mapped by `jax.vmap`."""

    function: Callable[..., jax.Array]
    axes: tuple[int | None, ...]

    def __call__(self, *args: Any) -> jax.Array:
        mapped: jax.Array = jax.vmap(self.function, self.axes)(*args)
        return mapped


@dataclasses.dataclass(frozen=True)
class Equation:
    """An equation of one result, as a function of its inputs."""

    primitive: Primitive
    params: tuple[tuple[str, Any], ...]
    """Its parameters, by name."""

    @classmethod
    def of(cls, eqn: Any) -> "Equation":
        """Returns an equation of a jaxpr."""
        return cls(eqn.primitive, tuple(eqn.params.items()))

    def with_params(self, **params: Any) -> "Equation":
        """Returns the equation with other values of some parameters."""
        changed = {**dict(self.params), **params}
        return dataclasses.replace(self, params=tuple(changed.items()))

    def __call__(self, *values: Any) -> jax.Array:
        result: jax.Array = self.primitive.bind(*values, **dict(self.params))
        return result


@dataclasses.dataclass(frozen=True)
class _FloatContraction:
    """A contraction of floats, as a function of the arrays of its parts."""

    structure: Any
    """Tree of the operation, lhs and rhs."""

    options: Options

    def __call__(self, *leaves: Any) -> Any:
        operation, lhs, rhs = jax.tree.unflatten(self.structure, leaves)
        return contract(None, operation, lhs, rhs, self.options)


def marked(
    mark: Callable[..., Injected],
    cfg: config.DotGeneral,
    operation: Operation,
    lhs: Any,
    rhs: Any,
    options: Options,
) -> jax.Array:
    """Contracts floats, marked.

    Args:
        mark: `Injected` or `Described`.
        cfg: the config to quantize it with.
        operation: the contraction.
        lhs: array.
        rhs: array.
        options: other arguments; those of quantized contractions are not used.
    """
    leaves, structure = jax.tree.flatten((operation, lhs, rhs))
    function = _FloatContraction(structure, options._replace(key=None, states=None))
    return mark(function, cfg)(*leaves)
