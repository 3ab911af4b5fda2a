"""Names with placeholders such as ``{i}``, which stand for parts of other names."""

import re
from collections.abc import Mapping

_PLACEHOLDER = re.compile(r"\{([a-z]+)\}")


def placeholders(name: str) -> list[str]:
    """Returns the placeholders of a name, in its order."""
    return _PLACEHOLDER.findall(name)


def filled(name: str, values: Mapping[str, str]) -> str:
    """Returns a name with values in place of its placeholders."""
    return _PLACEHOLDER.sub(lambda found: values[found[1]], name)


def pattern_of(name: str) -> re.Pattern:
    """Returns the regular expression of a name with placeholders."""
    pieces = _PLACEHOLDER.split(name)
    seen: set[str] = set()
    text = ""
    for i, piece in enumerate(pieces):
        if i % 2 == 0:
            text += re.escape(piece)
        elif piece in seen:
            text += f"(?P={piece})"
        else:
            seen.add(piece)
            text += rf"(?P<{piece}>\w+)"
    return re.compile(text, re.ASCII)
