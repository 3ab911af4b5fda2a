"""Configs as JSON: plain data, read back into known classes only."""

import dataclasses
import json
import math
from typing import Any, NoReturn, cast

import numpy as np

from aqtlite import calibration, noise, numerics
from aqtlite.config import registry, representation
from aqtlite.config.dot_general import DotGeneral, DotGeneralRaw
from aqtlite.config.tensor import Tensor

_VERSION = 1
_ROOTS = (DotGeneral, DotGeneralRaw, Tensor)


def to_json(
    cfg: DotGeneral | DotGeneralRaw | Tensor, *, indent: int | None = None
) -> str:
    """Writes a config as JSON, every field of it, defaults included.

    >>> from aqtlite import config
    >>> text = to_json(config.fully_quantized())
    >>> text[:40]
    '{"version": 1, "type": "DotGeneral", "fw'
    >>> from_json(text) == config.fully_quantized()
    True

    Args:
        cfg: the config.
        indent: spaces by which each level is indented; None for a single line.

    Raises:
        TypeError: if `cfg` is no config, or holds an object of a class that is not
            registered (one of your own, say; see `register`).
    """
    if not isinstance(cfg, _ROOTS):
        raise TypeError(
            f"to_json needs a DotGeneral, DotGeneralRaw or Tensor, got {cfg!r}"
        )
    data = {"version": _VERSION, **_encode(cfg, "$")}
    return json.dumps(data, indent=indent, allow_nan=False)


def from_json(text: str) -> DotGeneral | DotGeneralRaw | Tensor:
    """Reads what `to_json` wrote. A field that is not there takes its default.

    >>> from_json('{"version": 1, "type": "Tensor", "numerics": '
    ...           '{"type": "IntSymmetric", "bits": 4}}')
    Tensor(numerics=IntSymmetric(bits=4))
    >>> from_json('{"version": 1, "type": "DotGeneral", "bwd": null}')
    Traceback (most recent call last):
    ...
    ValueError: $.bwd: a DotGeneral has no such field; its fields are: fwd, dlhs, \
drhs, out

    Args:
        text: JSON. It is data: nothing in it is evaluated or imported.

    Raises:
        TypeError: if `text` is not a string.
        ValueError: if it is not JSON, not of version 1, or does not describe a valid
            config; the message names the place, ``$`` being the whole text.
    """
    if not isinstance(text, str):
        raise TypeError(f"from_json needs a string, got {type(text).__name__}")
    try:
        data = json.loads(
            text, object_pairs_hook=_Object, parse_constant=lambda name: float(name)
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"$: not valid JSON: {error}") from error
    if not isinstance(data, _Object):
        _fail("$", f"expected an object of type {_either(_ROOTS)}, got {data!r}")
    fields = data.as_dict("$")
    if "version" not in fields:
        _fail("$", f'there is no "version"; this library reads version {_VERSION}')
    version = fields.pop("version")
    if type(version) is not int or version != _VERSION:
        _fail("$.version", f"{version!r}; this library reads only version {_VERSION}")
    cfg = _build(fields, "$")
    if not isinstance(cfg, _ROOTS):
        _fail("$.type", f"expected {_either(_ROOTS)}, got {type(cfg).__name__!r}")
    return cfg


def _encode(value: Any, path: str) -> Any:
    """A field's value as plain data."""
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, tuple):
        return list(value)
    # One's own need not be a dataclass.
    families = numerics.Numerics | calibration.Calibration | noise.Noise
    if not (representation.is_record(value) or isinstance(value, families)):
        return value
    name = type(value).__name__
    if registry.find(name) is not type(value):
        raise TypeError(
            f"{path}: a {name} cannot be written as JSON, because it is not registered;"
            f" decorate it with config.register. Registered: {_known()}"
        )
    arguments = {
        field.name: _encode(getattr(value, field.name), f"{path}.{field.name}")
        for field in dataclasses.fields(cast(Any, value))
    }
    return {"type": name, **arguments}


class _Object:
    """A JSON object as it was written, so that repeated keys are still there."""

    def __init__(self, pairs: list[tuple[str, Any]]):
        self.pairs = pairs

    def __repr__(self) -> str:
        return "an object"

    def as_dict(self, path: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in self.pairs:
            if key in result:
                _fail(f"{path}.{key}", "this key is given twice")
            result[key] = value
        return result


def _decode(value: Any, path: str) -> Any:
    if isinstance(value, _Object):
        return _build(value.as_dict(path), path)
    if isinstance(value, list):
        return tuple(_decode(item, f"{path}[{i}]") for i, item in enumerate(value))
    if isinstance(value, float) and not math.isfinite(value):
        _fail(path, f"{value} is not a finite number")
    return value


def _build(fields: dict[str, Any], path: str) -> Any:
    """Builds the object of class ``fields["type"]``."""
    if "type" not in fields:
        _fail(path, f'there is no "type"; the known types are: {_known()}')
    name = fields.pop("type")
    cls = registry.find(name) if isinstance(name, str) else None
    if cls is None:
        raise registry.UnknownClassError(
            f"{path}.type: unknown type {name!r}; the known types are: {_known()}. A "
            "class of your own is known once the module is imported in which it is "
            "decorated with config.register"
        )
    known = [field.name for field in dataclasses.fields(cls)]
    for key in fields:
        if key not in known:
            options = ", ".join(known) or "none"
            _fail(
                f"{path}.{key}",
                f"a {name} has no such field; its fields are: {options}",
            )
    arguments = {key: _decode(item, f"{path}.{key}") for key, item in fields.items()}
    try:
        return cls(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _known() -> str:
    return ", ".join(registry.names())


def _either(classes: tuple[type, ...]) -> str:
    return " or ".join(repr(cls.__name__) for cls in classes)


def _fail(path: str, problem: str) -> NoReturn:
    raise ValueError(f"{path}: {problem}")
