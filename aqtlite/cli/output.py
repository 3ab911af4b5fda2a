"""Output of commands: results to standard output, all else to standard error."""

import json
import sys
from typing import Any

import rich.console

_UNLIMITED = 200
"""Width of output that is not a terminal, in columns: enough not to fold paths."""


def results() -> rich.console.Console:
    """The console for results."""
    width = None if sys.stdout.isatty() else _UNLIMITED
    return rich.console.Console(width=width, highlight=False, markup=False)


def messages() -> rich.console.Console:
    """The console for progress and other messages."""
    return rich.console.Console(stderr=True, highlight=False, markup=False)


def print_json(data: Any) -> None:
    """Prints a result as JSON."""
    print(json.dumps(data, indent=2))
