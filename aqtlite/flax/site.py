"""Where in a Flax model a contraction stands.

A contraction keeps its frozen weights with the module that *calls* it, not with the
object that was called: one `AqtDotGeneral` may serve many layers, and each of them
has a scope of its own.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import errors
from flax import linen as nn
from flax.core import Scope, tracers

from aqtlite import config
from aqtlite import dimension_numbers as dn
from aqtlite.flax.placeholder import FrozenKernel

COLLECTION = "aqt"
"""The collection of frozen weights, and the name of the optional rng stream."""

ORIGINAL = "original "
"""In front of the name under which a conversion records a float operand."""

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


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[],
    meta_fields=["cfg", "dimension_numbers", "shapes", "frozen", "removed"],
)
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

    removed: tuple[str, ...] = ()
    """Which parameters of the calling module were replaced by a `FrozenKernel`."""

    def contracting(self, side: str) -> frozenset[int]:
        """The contracting axes of one operand, along which it shares its scale."""
        (lhs_ca, rhs_ca), _ = self.dimension_numbers
        return frozenset(lhs_ca if side == "lhs" else rhs_ca)

    def serving_order(self, side: str, ndim: int) -> tuple[int, ...]:
        """The order in which to store a frozen operand: what it sums over comes last.

        A few rows by a 4096 x 4096 kernel take a CPU half the time that way.
        """
        contracting = sorted(self.contracting(side))
        others = (axis for axis in range(ndim) if axis not in contracting)
        return (*others, *contracting)


class AqtContraction(nn.Module):
    """A child that Flax attaches to the module whose method is running.

    That is all it is for: its parent is the caller, and its scope, named in order of
    the calls like that of any child, is where the caller's frozen weights lie.
    """

    def __post_init__(self):
        # Flax may refuse the child, but has told the parent by then. It is the one
        # public way to the module that is running: should Flax come to check first,
        # `find_scope` returns None, nothing is frozen, and the tests of this file fail.
        try:
            super().__post_init__()
        except errors.AssignSubModuleError:
            object.__setattr__(self, "refusal", "not compact")
        except errors.NameInUseError:
            object.__setattr__(self, "refusal", "name in use")


def find_scope(function: Any, name: str | None) -> Scope | None:
    """The scope for the frozen weights of the running call of `function`.

    Args:
        function: the object that the module called.
        name: the scope's name; None derives one.

    Returns:
        A scope below the calling module's; None where there is no calling module, or
        where it is running inside a `jax.jit` or another transformation of its own
        that Flax does not know, such as the one in `jnp.einsum`: variables cannot
        leave it, and its trace may come from a cache.
    """
    child = AqtContraction(name=name)
    caller = child.parent
    if not isinstance(caller, nn.Module) or caller.scope is None:
        return None
    if caller.scope.trace_level != tracers.current_trace():
        return None
    if child.scope is not None:
        return child.scope
    refusal = getattr(child, "refusal", None)
    if name is None and refusal == "name in use":
        # Two modules that share a scope (nn.share_scope) count their children apart.
        return caller.scope.push(prefix=f"{AqtContraction.__name__}_")
    if name is None:
        # Without @nn.compact there is no order of calls to name children by; what is
        # stable is the attribute that holds the function.
        name = _attribute_of(caller, function) or type(function).__name__
    return caller.scope.push(name, reuse=True)


def _attribute_of(caller: nn.Module, function: Any) -> str | None:
    """The name of the attribute that holds a function, or holds it in a container."""
    for attribute, value in vars(caller).items():
        if value is function:
            return attribute
        if isinstance(value, Mapping):
            entries = list(value.items())
        elif isinstance(value, tuple | list):
            entries = list(enumerate(value))
        else:
            continue
        for key, entry in entries:
            if entry is function:
                return f"{attribute}_{key}"
    return None


def check_removed(scope: Scope, stored: Site) -> None:
    """Refuses frozen weights beside the float parameters that they were made of.

    Raises:
        ValueError: if a parameter that the conversion replaced is there again.
    """
    parent = scope.parent
    if parent is None:
        return
    params = parent.variables().get("params", {})
    for name in stored.removed:
        if name in params and not isinstance(params[name], FrozenKernel):
            raise ValueError(
                f"parameter {name!r} of {parent.path_text or '/'} is a float, "
                "but the frozen weights that were made of it are there too and would "
                "be used in its place; convert the float variables again"
            )


def check_no_frozen_kernel(scope: Scope | None, why: str) -> None:
    """Refuses to contract a kernel that was frozen as if it were a float.

    Raises:
        ValueError: if the calling module has a `FrozenKernel` among its parameters.
    """
    if scope is None or scope.parent is None:
        return
    for name, value in scope.parent.variables().get("params", {}).items():
        if isinstance(value, FrozenKernel):
            raise ValueError(
                f"parameter {name!r} of {scope.parent.path_text or '/'} is frozen (it "
                f"was {value.dtype} of shape {value.shape}), but {why}. Serve with the "
                "model, config and variables of the conversion"
            )
