"""The classes of quantized NNX models, and of their layers.

Each is a subclass of the class of the model or layer, whose methods it quantizes.
"""

import functools
import types
from typing import Any, cast

import jax
from flax import nnx

from aqtlite.flax.nnx import calls, layers
from aqtlite.flax.nnx.model import (
    ATTRIBUTE,
    QuantizedLayer,
    QuantizedModel,
    float_class_of,
    set_class,
)
from aqtlite.program.modules import nnx_methods

_CALLS = {QuantizedModel: calls.call_method, QuantizedLayer: calls.call_layer}
"""For each base class, the function that calls a method."""


def quantize(model: nnx.Module, attribute: Any) -> None:
    """Turns a model into a quantized one, in place.

    Args:
        model: a model, quantized or not.
        attribute: its `Quantization`.
    """
    for layer in list(layers.below(model)):
        _set_class(layer, QuantizedLayer)
    _set_class(model, QuantizedModel)
    setattr(model, ATTRIBUTE, attribute)


def _set_class(model: nnx.Module, kind: type[nnx.Module]) -> None:
    # A module of a class with `pytree=False` is a leaf.
    is_pytree = not jax.tree_util.all_leaves([model])
    set_class(model, _subclass(float_class_of(model), kind, is_pytree))


@functools.cache
def _subclass(
    base: type[nnx.Module], kind: type[nnx.Module], is_pytree: bool
) -> type[nnx.Module]:
    """Returns the one subclass for quantized models, or layers, of a class."""

    def read(self: Any, name: str) -> Any:
        value = base.__getattribute__(self, name)
        layers.note(self, name, value)
        return value

    def fill(namespace: dict[str, Any]) -> None:
        call = _CALLS[kind]
        of_class = {
            name: _method(base, name, call) for name in nnx_methods.names_of(base)
        }
        namespace.update(of_class, _quantized_methods=of_class, _float_class=base)
        namespace["__getattribute__"] = read
        empty = _empty, (base, kind, is_pytree)
        namespace["__reduce__"] = lambda self: (*empty, vars(self))
        for name in ("__module__", "__qualname__", "__doc__"):
            namespace[name] = getattr(base, name)

    # The temporary name keeps registries of subclasses by name from overwriting `base`.
    name, bases = f"Quantized{base.__name__}", (base, kind)
    made = types.new_class(name, bases, {"pytree": is_pytree}, fill)
    made.__name__ = base.__name__
    return cast(type[nnx.Module], made)


def _empty(
    base: type[nnx.Module], kind: type[nnx.Module], is_pytree: bool
) -> nnx.Module:
    """Returns a quantized model, or a layer, without attributes, for pickle."""
    cls = _subclass(base, kind, is_pytree)
    return cls.__new__(cls)


def _method(base: type[nnx.Module], name: str, call: Any) -> Any:
    """Returns the quantized version of a method."""

    @functools.wraps(getattr(base, name))
    def run(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        return call(self, name, args, kwargs)

    return run
