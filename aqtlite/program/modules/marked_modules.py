"""Modules of a traced NNX model, which mark their equations with their paths.

NNX names no scopes and has no interceptors. In the copy that is traced, modules have
classes whose methods enter a mark, and their paths as attributes, which copies that
transformations make of them (`nnx.remat`, `nnx.scan`) have, too. A module of Linen that
makes an NNX module in its call (`nnx.bridge.ToLinen`) is given a class that marks it.
"""

import contextlib
import dataclasses
import functools
import types
from collections.abc import Iterator
from typing import Any, cast

import jax
from flax import linen as nn
from flax import nnx

from aqtlite.jaxpr import module_scopes
from aqtlite.program.modules import nnx_methods

# With the beginning of NNX's own attributes: `nnx.bridge.ToNNX` takes any other for a
# variable of Linen.
_PATH = "_pytree__path_in_model"


def mark(model: nnx.Module, around: module_scopes.Path = ()) -> None:
    """Lets the modules of a model mark their equations, in place.

    Args:
        model: a copy of a float model, for a single trace.
        around: path of the module of Linen that the model is part of, if any.
    """
    for path, module in nnx.iter_modules(model):
        if isinstance(module, nnx.List | nnx.Dict):
            continue
        is_pytree = not jax.tree_util.all_leaves([module])
        # Past NNX's `__setattr__`.
        object.__setattr__(module, _PATH, (*around, *map(str, path)))
        object.__setattr__(module, "__class__", _marking(type(module), is_pytree))


@dataclasses.dataclass(frozen=True)
class _Marked:
    """The class of an NNX module, for a module of Linen that makes one in its call."""

    base: type[nnx.Module]
    around: module_scopes.Path

    def __call__(self, *args: Any, **kwargs: Any) -> nnx.Module:
        made = self.base(*args, **kwargs)
        mark(made, self.around)
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)


_CLASS = "nnx_class"
"""The field of `nnx.bridge.ToLinen`, and of copies of it, with the class to make."""


@contextlib.contextmanager
def marking_inside(module: nn.Module) -> Iterator[None]:
    """Lets the NNX module that a module of Linen makes in its call mark its equations.

    Args:
        module: a module whose method is called, such as an `nnx.bridge.ToLinen`.
    """
    # Not by `getattr`, which would call `setup`.
    base = vars(module).get(_CLASS)
    if not (isinstance(base, type) and issubclass(base, nnx.Module)):
        yield
        return
    # Past Linen's `__setattr__`, for the object that is bound for this trace.
    object.__setattr__(module, _CLASS, _Marked(base, module.path))
    try:
        yield
    finally:
        object.__setattr__(module, _CLASS, base)


@functools.cache
def _marking(base: type[nnx.Module], is_pytree: bool) -> type[nnx.Module]:
    """Returns the subclass of a class whose methods mark equations."""

    def fill(namespace: dict[str, Any]) -> None:
        namespace.update(
            {name: _method(base, name) for name in nnx_methods.names_of(base)}
        )
        for name in ("__module__", "__qualname__", "__doc__"):
            namespace[name] = getattr(base, name)

    # The temporary name keeps registries of subclasses by name from overwriting `base`.
    name = f"Marking{base.__name__}"
    made = types.new_class(name, (base,), {"pytree": is_pytree}, fill)
    made.__name__ = base.__name__
    return cast(type[nnx.Module], made)


def _method(base: type[nnx.Module], name: str) -> Any:
    """Returns a method that marks its equations."""

    @functools.wraps(getattr(base, name), updated=())
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with module_scopes.entering(module_scopes.Module("", getattr(self, _PATH))):
            # Looked up again, for `nnx.capture` changes methods of classes.
            return getattr(base, name)(self, *args, **kwargs)

    return run
