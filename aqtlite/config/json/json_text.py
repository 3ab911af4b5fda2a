"""Reading of untrusted JSON, with errors that name the place in the text."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

_DEEPEST = 100
_BITS = 64

_DTYPES: Mapping[str, np.dtype] = {
    name: jnp.dtype(name)
    for name in (
        *("bool", "complex64", "complex128"),
        *("int2", "int4", "int8", "int16", "int32", "int64"),
        *("uint2", "uint4", "uint8", "uint16", "uint32", "uint64"),
        *("bfloat16", "float16", "float32", "float64", "float4_e2m1fn"),
        *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
        *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
}
"""Dtypes that a text can name. NumPy would accept more: structures, subarrays,
objects."""


def read(text: str) -> Any:
    """Parses JSON into plain data.

    Args:
        text: JSON text. NaN and Infinity are read as floats.

    Raises:
        TypeError: if `text` is not a string.
        ValueError: if `text` is not JSON, is nested too deeply, repeats a key or has an
            integer of more than 64 bits; the message names the place, ``$`` being the
            whole text.
    """
    if not isinstance(text, str):
        raise TypeError(f"from_json needs a string, got {type(text).__name__}")
    try:
        data = json.loads(text, object_pairs_hook=_Object)
    except RecursionError as error:
        raise ValueError("$: not valid JSON: it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"$: not valid JSON: {error}") from error
    return _checked(data, "$", _DEEPEST)


class _Object:
    """A JSON object as a list of pairs, which keeps repeated keys."""

    def __init__(self, pairs: list[tuple[str, Any]]):
        self.pairs = pairs


def _checked(value: Any, path: str, levels: int) -> Any:
    if not levels:
        fail("$", f"nested more than {_DEEPEST} levels deep")
    if isinstance(value, _Object):
        result: dict[str, Any] = {}
        for key, item in value.pairs:
            if key in result:
                fail(f"{path}.{key}", "this key is given twice")
            result[key] = _checked(item, f"{path}.{key}", levels - 1)
        return result
    if isinstance(value, list):
        return [
            _checked(item, f"{path}[{i}]", levels - 1) for i, item in enumerate(value)
        ]
    if isinstance(value, int) and value.bit_length() >= _BITS:
        fail(path, f"an integer of more than {_BITS} bits")
    return value


def versioned(data: Any, version: int, what: str, path: str = "$") -> dict[str, Any]:
    """Checks the version of a JSON object and returns the other fields.

    Args:
        data: data from `read`.
        version: the only supported version.
        what: description of the object, for the message.
        path: place of the object in the text.

    Raises:
        ValueError: if `data` is not an object, or of another version.
    """
    if not isinstance(data, dict):
        fail(path, f"expected {what}, got {data!r:.100}")
    fields = dict(data)
    if "version" not in fields:
        fail(path, f'there is no "version"; this library reads version {version}')
    found = fields.pop("version")
    if type(found) is not int or found != version:
        fail(
            f"{path}.version",
            f"{found!r:.100}; this library reads only version {version}",
        )
    return fields


def dtype(name: Any) -> np.dtype:
    """The dtype of this name, among the supported ones.

    >>> dtype("bfloat16")
    dtype(bfloat16)
    >>> dtype("O")
    Traceback (most recent call last):
    ...
    ValueError: 'O' is no name of a dtype, such as 'float32' or 'int8'

    Raises:
        ValueError: if no supported dtype has this name.
    """
    found = _DTYPES.get(name) if isinstance(name, str) else None
    if found is None:
        raise ValueError(
            f"{name!r:.100} is no name of a dtype, such as 'float32' or 'int8'"
        )
    return found


def fail(path: str, problem: str) -> NoReturn:
    """Raises ValueError for a problem at a place in a text."""
    raise ValueError(f"{path}: {problem}")
