"""Configs as JSON: plain data, read back into known classes only."""

import dataclasses
import json
import math
from typing import Any, cast

import numpy as np

from aqtlite import calibration, noise, numerics
from aqtlite.config import representation
from aqtlite.config.dot_general import DotGeneral, DotGeneralRaw
from aqtlite.config.json import json_text, registry
from aqtlite.config.json.json_text import fail
from aqtlite.config.lora import Lora
from aqtlite.config.tensor import Tensor

_VERSION = 1
_ROOTS = (DotGeneral, DotGeneralRaw, Tensor, Lora)


def to_json(
    cfg: DotGeneral | DotGeneralRaw | Tensor | Lora, *, indent: int | None = None
) -> str:
    """Writes a config as JSON, with all fields, defaults included.

    >>> from aqtlite import config
    >>> text = to_json(config.fully_quantized())
    >>> text[:40]
    '{"version": 1, "type": "DotGeneral", "fw'
    >>> from_json(text) == config.fully_quantized()
    True

    Args:
        cfg: config to write.
        indent: spaces of indentation per level; None for a single line.

    Raises:
        TypeError: if `cfg` is not a config, or contains an object of an unregistered
            class (see `register`).
    """
    if not isinstance(cfg, _ROOTS):
        raise TypeError(
            f"to_json needs a DotGeneral, DotGeneralRaw, Tensor or Lora, got {cfg!r}"
        )
    data = {"version": _VERSION, **_encode(cfg, "$")}
    return json.dumps(data, indent=indent, allow_nan=False)


def from_json(text: str) -> DotGeneral | DotGeneralRaw | Tensor | Lora:
    """Reads a config written by `to_json`. Missing fields take their defaults.

    >>> from_json('{"version": 1, "type": "Tensor", "numerics": '
    ...           '{"type": "IntSymmetric", "bits": 4}}')
    Tensor(numerics=IntSymmetric(bits=4))
    >>> from_json('{"version": 1, "type": "DotGeneral", "bwd": null}')
    Traceback (most recent call last):
    ...
    ValueError: $.bwd: a DotGeneral has no such field; its fields are: fwd, dlhs, \
drhs, out

    Args:
        text: JSON text, which may be untrusted: it is never evaluated, and no class is
            imported.

    Raises:
        TypeError: if `text` is not a string.
        ValueError: if `text` is not JSON, not of version 1, or does not describe a
            valid config; the message names the place, ``$`` being the whole text.
    """
    return from_data(json_text.read(text))


def from_data(data: Any, path: str = "$") -> DotGeneral | DotGeneralRaw | Tensor | Lora:
    """Reads a config that is part of a larger JSON text.

    Args:
        data: data from `json_text.read`.
        path: place of the config in the text.

    Raises:
        ValueError: as for `from_json`.
    """
    what = f"an object of type {_either(_ROOTS)}"
    cfg = object_from_data(json_text.versioned(data, _VERSION, what, path), path)
    if not isinstance(cfg, _ROOTS):
        fail(f"{path}.type", f"expected {_either(_ROOTS)}, got {type(cfg).__name__!r}")
    return cfg


def _encode(value: Any, path: str) -> Any:
    """Converts a field's value to plain data."""
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, tuple):
        return list(value)
    # A user's class need not be a dataclass.
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


def _decode(value: Any, path: str) -> Any:
    if isinstance(value, dict):
        return object_from_data(value, path)
    if isinstance(value, list):
        return tuple(_decode(item, f"{path}[{i}]") for i, item in enumerate(value))
    if isinstance(value, float) and not math.isfinite(value):
        fail(path, f"{value} is not a finite number")
    return value


def object_from_data(data: dict[str, Any], path: str) -> Any:
    """Makes a part of a config: an object of class ``data["type"]``.

    Args:
        data: fields of the object, from `json_text.read`.
        path: place of the object in the text.

    Raises:
        ValueError: if no such class is registered, or it rejects the fields.
    """
    if "type" not in data:
        fail(path, f'there is no "type"; the known types are: {_known()}')
    fields = dict(data)
    name = fields.pop("type")
    cls = registry.find(name) if isinstance(name, str) else None
    if cls is None:
        raise registry.UnknownClassError(
            f"{path}.type: unknown type {name!r:.100}; the known types are: "
            f"{_known()}. A class of your own is known once the module is imported in "
            "which it is decorated with config.register"
        )
    known = [field.name for field in dataclasses.fields(cls)]
    for key in fields:
        if key not in known:
            options = ", ".join(known) or "none"
            fail(
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
