"""Where in a Flax model a contraction stands.

A contraction keeps its frozen weights with the module that *calls* it, not with the
object that was called: one `AqtDotGeneral` may serve many layers, and each of them
has a scope of its own.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from flax import errors
from flax import linen as nn
from flax.core import Scope

from aqtlite import config
from aqtlite import dimension_numbers as dn

COLLECTION = "aqt"
"""The collection of frozen weights, and the name of the optional rng stream."""

_converting = contextvars.ContextVar("aqtlite_converting", default=False)


@contextlib.contextmanager
def converting() -> Iterator[None]:
    """While it lasts, contractions record their quantized operands."""
    token = _converting.set(True)
    try:
        yield
    finally:
        _converting.reset(token)


def is_converting() -> bool:
    """Whether `converting` is in effect."""
    return _converting.get()


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """What `convert` knew of a contraction: a pytree without leaves.

    It lies beside the frozen weights, and serving compares it with the call.
    """

    cfg: config.DotGeneral = dataclasses.field(repr=False)
    dimension_numbers: dn.DimensionNumbers
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    frozen: tuple[str, ...]
    """Which operands are frozen: a subset of ("lhs", "rhs")."""


class Contraction(nn.Module):
    """A child that Flax attaches to the module whose method is running.

    That is all it is for: its parent is the caller, and its scope, named in order of
    the calls like that of any child, is where the caller's frozen weights lie.
    """

    def __post_init__(self):
        # Outside @nn.compact Flax refuses children, but tells the parent before.
        with contextlib.suppress(errors.AssignSubModuleError):
            super().__post_init__()


def find_scope(function: Any, name: str | None) -> Scope | None:
    """The scope for the frozen weights of the running call of `function`.

    Args:
        function: the object that the module called.
        name: the scope's name; None derives one.

    Returns:
        A scope below the calling module's; None where there is no calling module, or
        where it is running inside a `jax.jit` or another transformation of its own
        that Flax does not know, such as the one in `jnp.einsum`.
    """
    try:
        child = Contraction(name=name)
    except errors.JaxTransformError:
        return None
    if child.scope is not None:
        return child.scope
    caller = child.parent
    if not isinstance(caller, nn.Module) or caller.scope is None:
        return None
    if name is None:
        # Without @nn.compact there is no order of calls to name children by; what is
        # stable is the attribute that holds the function.
        name = next(
            (key for key, value in vars(caller).items() if value is function),
            type(function).__name__,
        )
    return caller.scope.push(name, reuse=True)
