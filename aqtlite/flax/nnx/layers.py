"""Layers of quantized models: which model a layer is of, and where it is in it.

A layer that is called by itself is quantized as within its model, whose rules and
states it needs. It has no reference to the model, which would be another path to the
model's variables: a layer that is read from a model is remembered as that of the model.
"""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from flax import nnx

from aqtlite.flax.nnx.model import (
    ATTRIBUTE,
    QuantizedLayer,
    QuantizedModel,
    float_class_of,
    set_class,
)

Path = tuple[Any, ...]


class Home(NamedTuple):
    """The model of a layer, and the steps to the layer."""

    model: QuantizedModel
    path: Path


def below(model: nnx.Module) -> Iterator[nnx.Module]:
    """Yields the layers below a model, except those of quantized models in it."""
    for _, node in _walk(model, QuantizedModel):
        is_container = isinstance(node, nnx.List | nnx.Dict)
        is_layer = isinstance(node, nnx.Module) and not is_container
        if is_layer and not isinstance(node, QuantizedModel):
            yield node


def quantized_below(model: nnx.Module) -> Iterator[tuple[Path, QuantizedModel]]:
    """Yields the quantized models inside of a model, with their paths."""
    for path, node in _walk(model, QuantizedModel):
        if isinstance(node, QuantizedModel):
            yield path, node


def make_float(model: QuantizedModel) -> None:
    """Turns a quantized model back into a float model, in place."""
    for layer in list(below(model)):
        if not _is_observed(layer):
            set_class(layer, float_class_of(layer))
    delattr(model, ATTRIBUTE)
    set_class(model, float_class_of(model))


def _is_observed(layer: nnx.Module) -> bool:
    """Whether methods of a layer's class are replaced, as by `nnx.capture`."""
    if not isinstance(layer, QuantizedLayer):
        return False
    now, methods = vars(type(layer)), layer._quantized_methods
    return any(now[name] is not method for name, method in methods.items())


def note(owner: QuantizedModel | QuantizedLayer, name: str, value: Any) -> None:
    """Remembers that layers were read from a model, or from one of its layers.

    Args:
        owner: the model or layer.
        name: name of the attribute that was read.
        value: its value: a layer, or a container of layers.
    """
    if not isinstance(value, _HOLDERS) or name == ATTRIBUTE or name.startswith("__"):
        return
    home = Home(owner, ()) if isinstance(owner, QuantizedModel) else home_of(owner)
    if home is None or isinstance(value, QuantizedModel):
        return
    if isinstance(value, QuantizedLayer):
        _note(value, Home(home.model, (*home.path, name)))
        return
    for path, node in _walk(value, (QuantizedLayer, QuantizedModel)):
        if isinstance(node, QuantizedLayer):
            _note(node, Home(home.model, (*home.path, name, *path)))


def home_of(layer: QuantizedLayer) -> Home | None:
    """Returns the model that a layer was read from; None for a layer without one."""
    known = _homes.get(id(layer))
    model = None if known is None else known[1]()
    return None if known is None or model is None else Home(model, known[2])


_homes: dict[int, tuple[Any, Any, Path]] = {}
"""For each layer, by `id`, weak references to it and to its model, and its path."""


def _note(layer: QuantizedLayer, home: Home) -> None:
    number = id(layer)
    reference = weakref.ref(layer, lambda _: _homes.pop(number, None))
    _homes[number] = reference, weakref.ref(home.model), home.path


_HOLDERS = (nnx.Pytree, list, tuple, dict)
"""Types of what may be a layer or contain some."""


def _walk(top: Any, leaves: type | tuple[type, ...]) -> Iterator[tuple[Path, Any]]:
    """Yields what may contain layers below an object, with its path.

    Args:
        top: the object.
        leaves: types that are not entered, below the object.
    """
    known = {id(top)}
    left: list[tuple[Path, Any]] = [((), top)]
    while left:
        path, node = left.pop()
        if path:
            yield path, node
            if isinstance(node, leaves):
                continue
        for step, value in _children(node):
            if isinstance(value, _HOLDERS) and id(value) not in known:
                known.add(id(value))
                left.append(((*path, step), value))


def _children(node: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(node, nnx.Pytree):
        return [(name, x) for name, x in vars(node).items() if name != ATTRIBUTE]
    if isinstance(node, dict):
        return node.items()
    return enumerate(node) if isinstance(node, list | tuple) else ()
