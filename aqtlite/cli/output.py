"""Output of commands: results to standard output, all else to standard error."""

import json
import pathlib
import sys
from typing import Any

import rich.console

from aqtlite.errors import UserError

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


def check_free(path: pathlib.Path, overwrite: bool) -> None:
    """Checks that a file can be written.

    Args:
        path: path of the file.
        overwrite: whether it may replace another.

    Raises:
        UserError: if it is a folder, or there already, or its folder is not there.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file")
    if not path.absolute().parent.is_dir():
        raise UserError(f"there is no folder {path.parent} to write {path.name} into")
    if path.exists() and not overwrite:
        raise UserError(f"{path} exists; --overwrite replaces it")
