"""Settings of a quantized checkpoint, read from JSON with checks."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from aqtlite.checkpoint.errors import CheckpointError

_LARGEST = 1 << 26
"""Bytes of a config; those of large models have some hundred thousand."""


def read_json(path: pathlib.Path) -> Mapping[str, Any]:
    """Reads a JSON file that holds an object.

    Raises:
        CheckpointError: if it is none, or nested too deeply.
    """
    try:
        if path.stat().st_size > _LARGEST:
            raise CheckpointError(f"{path} is no config: it has over {_LARGEST} bytes")
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def parse_json(text: bytes, where: str) -> Mapping[str, Any]:
    """Parses a JSON text that holds an object; raises as `read_json`."""
    try:
        values = json.loads(text)
    except RecursionError as error:
        raise CheckpointError(f"{where} is nested too deeply") from error
    except ValueError as error:
        raise CheckpointError(f"{where} is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{where} holds {type(values).__name__}, not an object")
    return values


@dataclasses.dataclass(frozen=True)
class Settings:
    """An object of a config; `where` names it in messages."""

    values: Mapping[str, Any]
    where: str

    def integer(
        self,
        key: str,
        least: int,
        default: int | None = None,
        most: int | None = None,
    ) -> int:
        """An integer that is no less than `least`, and no more than `most`."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, f"an integer of at least {least}")
        if most is not None and value > most:
            raise self.wrong(key, f"an integer from {least} to {most}")
        return value

    def one_of(self, key: str, options: Sequence[Any], default: Any = None) -> Any:
        """One of some values; `default` where the key is missing or null."""
        value = self.values.get(key)
        if value is None:
            value = default
        for one in options:
            if type(value) is type(one) and value == one:
                return one
        raise self.wrong(key, f"one of {', '.join(map(repr, options))}")

    def flag(self, key: str, default: bool) -> bool:
        """A bool."""
        return bool(self.one_of(key, (True, False), default))

    def strings(self, *keys: str) -> tuple[str, ...]:
        """The strings of a list under the first of the keys that is there."""
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if not isinstance(value, list) or not all(
                isinstance(x, str) for x in value
            ):
                raise self.wrong(key, "a list of strings")
            return tuple(value)
        return ()

    def inner(self, key: str) -> "Settings | None":
        """The object under a key; None where it is missing or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Settings(value, f"{self.where}: {key}")

    def wrong(self, key: str, wanted: str) -> CheckpointError:
        """The error for a value that is not what the format asks for."""
        text = " ".join(repr(self.values.get(key)).split())[:80]
        return CheckpointError(f"{self.where}: {key} has to be {wanted}, got {text}")
