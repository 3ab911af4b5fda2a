"""A model's sample inputs as JSON: their shapes, and what is not an array."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp


def encode(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Writes inputs; None if they hold anything but arrays and plain Python values."""
    try:
        return _encode([list(args), dict(kwargs)])
    except TypeError:
        return None


def decode(data: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Reads inputs, with shapes in place of arrays."""
    args, kwargs = _decode(data)
    return tuple(args), dict(kwargs)


def _encode(x: Any) -> Any:
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            raise TypeError(f"an array of {x.dtype}")
        return {"shape": list(x.shape), "dtype": jnp.dtype(x.dtype).name}
    if isinstance(x, dict) and all(isinstance(key, str) for key in x):
        return {"dict": {key: _encode(value) for key, value in x.items()}}
    if type(x) in (list, tuple):
        return {type(x).__name__: [_encode(value) for value in x]}
    if x is None or type(x) in (bool, int, float, str):
        return {"value": x}
    raise TypeError(f"a {type(x).__name__}")


def _decode(data: Any) -> Any:
    if "shape" in data:
        return jax.ShapeDtypeStruct(data["shape"], jnp.dtype(data["dtype"]))
    if "dict" in data:
        return {key: _decode(value) for key, value in data["dict"].items()}
    if "list" in data:
        return [_decode(value) for value in data["list"]]
    if "tuple" in data:
        return tuple(_decode(value) for value in data["tuple"])
    return data["value"]
