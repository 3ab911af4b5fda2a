"""Modules of a traced NNX model, which mark their equations with their paths.

NNX names no scopes and has no interceptors. In the copy that is traced, modules have
classes whose methods enter a mark, and their paths as attributes, which copies that
transformations make of them (`nnx.remat`, `nnx.scan`) have, too.
"""

import functools
import types
from typing import Any, cast

import jax
from flax import nnx

from aqtlite.flax.nnx import methods
from aqtlite.jaxpr import module_scopes

_PATH = "_path_in_model"


def mark(model: nnx.Module) -> None:
    """Lets the modules of a model mark their equations, in place.

    Args:
        model: a copy of a float model, for a single trace.
    """
    for path, module in nnx.iter_modules(model):
        if isinstance(module, nnx.List | nnx.Dict):
            continue
        is_pytree = not jax.tree_util.all_leaves([module])
        # Past NNX's `__setattr__`.
        object.__setattr__(module, _PATH, tuple(map(str, path)))
        object.__setattr__(module, "__class__", _marking(type(module), is_pytree))


@functools.cache
def _marking(base: type[nnx.Module], is_pytree: bool) -> type[nnx.Module]:
    """Returns the subclass of a class whose methods mark equations."""

    def fill(namespace: dict[str, Any]) -> None:
        namespace.update({name: _method(base, name) for name in methods.names_of(base)})
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
