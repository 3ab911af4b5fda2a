"""Rules as JSON: an object with a version, and an object for each rule."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from aqtlite.config import json_text

_Rule = TypeVar("_Rule")
_VERSION = 1


def write(fields: Sequence[Mapping[str, Any]], indent: int | None) -> str:
    """Writes rules.

    Args:
        fields: those of each rule, plain data.
        indent: spaces by which each level is indented; None for a single line.
    """
    return json.dumps({"version": _VERSION, "rules": list(fields)}, indent=indent)


def fields_of(rule: Any) -> dict[str, Any]:
    """The fields of a dataclass, by name; what they hold stays as it is."""
    return {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}


def read(
    text: str,
    rule: Callable[..., _Rule],
    decode: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> tuple[_Rule, ...]:
    """Reads what `write` wrote. A field that is not there takes its default.

    Args:
        text: JSON.
        rule: the dataclass.
        decode: makes its arguments of the fields of a rule.

    Raises:
        TypeError: if `text` is not a string.
        ValueError: if it is not JSON, not of version 1, or does not describe rules; the
            message names the place.
    """
    what = 'an object with "version" and "rules"'
    data = json_text.versioned(json_text.read(text), _VERSION, what)
    if set(data) != {"rules"} or not isinstance(data["rules"], list):
        json_text.fail("$", f"expected {what}, and a list at $.rules")
    known = [field.name for field in dataclasses.fields(rule)]  # type: ignore[arg-type]
    rules = []
    for i, fields in enumerate(data["rules"]):
        path = f"$.rules[{i}]"
        if not isinstance(fields, dict) or set(fields) - set(known):
            raise ValueError(
                f"{path}: expected an object with fields of {', '.join(known)}, got "
                f"{fields!r:.200}"
            )
        try:
            rules.append(rule(**decode(fields)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error
    return tuple(rules)
