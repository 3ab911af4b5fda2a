"""Where commands print: results to standard output, all else to standard error."""

import json
import sys
from typing import Any

import rich.console

_UNLIMITED = 200
"""Columns of output that is no terminal: no path is folded there."""


def results() -> rich.console.Console:
    """The console of results."""
    width = None if sys.stdout.isatty() else _UNLIMITED
    return rich.console.Console(width=width, highlight=False, markup=False)


def messages() -> rich.console.Console:
    """The console of progress, and of what a command says beside its result."""
    return rich.console.Console(stderr=True, highlight=False, markup=False)


def print_json(data: Any) -> None:
    """Prints a result as JSON."""
    print(json.dumps(data, indent=2))
