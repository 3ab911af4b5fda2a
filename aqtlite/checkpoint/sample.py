"""Sample inputs of a model as JSON: the shapes of arrays, and all other values."""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from aqtlite.checkpoint import arrays
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.jaxpr import tracing

_LONGEST = 1 << 24
"""Largest size of an axis. A contraction over more is traced in hundreds of pieces, and
a manifest could keep the reader busy for hours."""


def encode(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Encodes inputs as JSON data; None for inputs that it cannot encode.

    Inputs may be arrays and plain Python values, in dictionaries, lists and tuples, and
    in named tuples and dataclasses that are pytrees and defined in imported modules.
    """
    try:
        return _encode([list(args), dict(kwargs)])
    except TypeError:
        return None


def decode(data: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Decodes inputs, with abstract values in place of arrays.

    Raises:
        ValueError: if `encode` does not write such data.
        CheckpointError: if the inputs hold an object of a class that is not imported.
    """
    return _inputs(data, _object)


def check(data: Any) -> None:
    """Checks that data has the form that `encode` writes; ignores the classes it names.

    Raises:
        ValueError: if it has not.
    """
    _inputs(data, lambda name, fields: fields)


_Make = Callable[[str, dict[str, Any]], Any]
"""Function that makes an object from the name of a class and the fields."""


def _inputs(data: Any, make: _Make) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = _decode(data, make) if isinstance(data, dict) else (None, None)
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise ValueError("the sample inputs are not arguments and keywords")
    return tuple(args), kwargs


def _encode(x: Any) -> Any:
    if tracing.is_array(x):
        if max(x.shape, default=0) > _LONGEST:
            raise TypeError(f"an array of shape {x.shape}")
        return {"shape": list(x.shape), **_encode_dtype(x)}
    if isinstance(x, dict) and all(isinstance(key, str) for key in x):
        return {"dict": {key: _encode(value) for key, value in x.items()}}
    if type(x) in (list, tuple):
        return {type(x).__name__: [_encode(value) for value in x]}
    if _is_constant(x):
        return {"value": x}
    name = f"{type(x).__module__}:{type(x).__qualname__}"
    is_pytree = not jax.tree_util.treedef_is_leaf(jax.tree.structure(x))
    if is_pytree and _find(name) is type(x):
        fields = {field: _encode(getattr(x, field)) for field in _fields(type(x))}
        return {"class": name, "fields": fields}
    raise TypeError(f"a {name}")


def _encode_dtype(x: Any) -> dict[str, str]:
    if not jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return {"dtype": jnp.dtype(x.dtype).name}
    generator = arrays.generator_of(x) if arrays.is_key(x) else None
    if not isinstance(generator, str):
        raise TypeError(f"an array of {x.dtype}")
    return {"keys": generator}


def _decode(data: Any, make: _Make) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"a sample input of {data!r}")
    match data:
        case {"shape": list(shape), "dtype": str(dtype)}:
            return jax.ShapeDtypeStruct(_shape(shape), jnp.dtype(dtype))
        case {"shape": list(shape), "keys": str(generator)}:
            return arrays.shape_of_keys(generator, _shape(shape))
        case {"dict": dict(entries)}:
            return {key: _decode(value, make) for key, value in entries.items()}
        case {"list": list(entries)}:
            return [_decode(value, make) for value in entries]
        case {"tuple": list(entries)}:
            return tuple(_decode(value, make) for value in entries)
        case {"class": str(name), "fields": dict(fields)}:
            return make(name, {key: _decode(x, make) for key, x in fields.items()})
        case {"value": value} if _is_constant(value):
            return value
    raise ValueError(f"a sample input of {sorted(data)}")


def _shape(sizes: list[Any]) -> tuple[int, ...]:
    if not all(type(n) is int and 0 <= n <= _LONGEST for n in sizes):
        raise ValueError(f"a sample input of shape {sizes}")
    return tuple(sizes)


def _is_constant(x: Any) -> bool:
    return x is None or type(x) in (bool, int, float, str)


# --- Classes -------------------------------------------------------------------------


def _find(name: str) -> type | None:
    """Looks up a dataclass or named tuple by ``MODULE:QUALNAME`` in imported modules.

    Imports and calls nothing, since the name may come from an untrusted manifest.
    """
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for step in qualified.split("."):
        found = vars(found).get(step) if hasattr(found, "__dict__") else None
    is_known = isinstance(found, type) and (
        dataclasses.is_dataclass(found)
        or (issubclass(found, tuple) and hasattr(found, "_fields"))
    )
    return found if is_known else None


def _fields(cls: Any) -> tuple[str, ...]:
    if dataclasses.is_dataclass(cls):
        return tuple(field.name for field in dataclasses.fields(cls))
    return tuple(cls._fields)


def _object(name: str, fields: dict[str, Any]) -> Any:
    """Makes an object without calling its constructor, which may have side effects."""
    cls: Any = _find(name)
    if cls is None or set(_fields(cls)) != set(fields):
        found = "this program has not imported" if cls is None else "has other fields"
        raise CheckpointError(
            f"the sample inputs of the conversion hold a {name.replace(':', '.')} with "
            f"the fields {', '.join(fields)}, which {found}: import its module before "
            "load_serving, in the version that converted"
        )
    if issubclass(cls, tuple):
        return tuple.__new__(cls, [fields[field] for field in _fields(cls)])
    made = object.__new__(cls)
    for field, value in fields.items():
        object.__setattr__(made, field, value)
    return made
