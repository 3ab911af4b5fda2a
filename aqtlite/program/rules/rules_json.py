"""Rules as JSON: an object with a version and a list of objects, one per rule."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from aqtlite.config.json import json_text

_Rule = TypeVar("_Rule")
_VERSION = 1


def write(fields: Sequence[Mapping[str, Any]], indent: int | None) -> str:
    """Writes rules as JSON.

    Args:
        fields: the fields of each rule, plain data.
        indent: spaces per level of indentation; None for a single line.
    """
    return json.dumps({"version": _VERSION, "rules": list(fields)}, indent=indent)


def fields_of(rule: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass by name, without converting their values."""
    return {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}


def read(
    text: str,
    rule: Callable[..., _Rule],
    decode: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> tuple[_Rule, ...]:
    """Reads rules from the JSON of `write`. Missing fields take their defaults.

    Args:
        text: JSON.
        rule: dataclass of the rules.
        decode: function from the JSON fields of a rule to arguments of `rule`.

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
