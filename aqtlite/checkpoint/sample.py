"""Sample inputs of a model as JSON: shapes of arrays, values of the rest."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from aqtlite.config import json_text

_LONGEST = 1 << 24
"""Size of an axis. A contraction over more is traced in hundreds of pieces, and a
manifest could keep the reader busy for hours."""


def encode(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Encodes inputs; None unless they are arrays and plain Python values."""
    try:
        return _encode([list(args), dict(kwargs)])
    except TypeError:
        return None


def decode(data: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Decodes inputs, with shapes in place of arrays.

    Raises:
        ValueError: if `encode` writes no such data.
    """
    args, kwargs = _decode(data) if isinstance(data, dict) else (None, None)
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise ValueError("the sample inputs are not arguments and keywords")
    return tuple(args), kwargs


def _encode(x: Any) -> Any:
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            raise TypeError(f"an array of {x.dtype}")
        if max(x.shape, default=0) > _LONGEST:
            raise TypeError(f"an array of shape {x.shape}")
        return {"shape": list(x.shape), "dtype": jnp.dtype(x.dtype).name}
    if isinstance(x, dict) and all(isinstance(key, str) for key in x):
        return {"dict": {key: _encode(value) for key, value in x.items()}}
    if type(x) in (list, tuple):
        return {type(x).__name__: [_encode(value) for value in x]}
    if _is_constant(x):
        return {"value": x}
    raise TypeError(f"a {type(x).__name__}")


def _decode(data: Any) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"a sample input of {data!r}")
    match data:
        case {"shape": list(shape), "dtype": str(dtype)}:
            if not all(type(n) is int and 0 <= n <= _LONGEST for n in shape):
                raise ValueError(f"a sample input of shape {shape}")
            return jax.ShapeDtypeStruct(tuple(shape), json_text.dtype(dtype))
        case {"dict": dict(entries)}:
            return {key: _decode(value) for key, value in entries.items()}
        case {"list": list(entries)}:
            return [_decode(value) for value in entries]
        case {"tuple": list(entries)}:
            return tuple(_decode(value) for value in entries)
        case {"value": value} if _is_constant(value):
            return value
    raise ValueError(f"a sample input of {sorted(data)}")


def _is_constant(x: Any) -> bool:
    return x is None or type(x) in (bool, int, float, str)
