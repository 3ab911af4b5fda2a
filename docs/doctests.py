"""Examples of docstrings as blocks of code, for the API reference."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?:^>>> .*\n(?:(?!\n).+\n?)*\n?)+", re.M)


class Doctests(griffe.Extension):
    """Fences the lines from ``>>>`` to the next empty one."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Changes the docstring of an object that was read."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(
                lambda found: f"```pycon\n{found[0].rstrip()}\n```\n\n",
                obj.docstring.value,
            )
