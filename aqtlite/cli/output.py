"""Output of commands: results to standard output, all else to standard error."""

import contextlib
import json
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import rich.console

from aqtlite.errors import UserError
from aqtlite.output import files

_UNLIMITED = 200
"""Width of output that is not a terminal, in columns: enough not to fold paths."""


def results() -> rich.console.Console:
    """The console for results."""
    width = None if sys.stdout.isatty() else _UNLIMITED
    return rich.console.Console(width=width, highlight=False, markup=False)


def messages() -> rich.console.Console:
    """The console for progress and other messages."""
    return rich.console.Console(stderr=True, highlight=False, markup=False)


@contextlib.contextmanager
def errors_in_one_line(*kinds: type[Exception]) -> Iterator[None]:
    """Turns errors of the library into `UserError`s of one line.

    Args:
        *kinds: classes of the errors.
    """
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        raise UserError(" ".join(str(error).split())) from error


def print_json(data: Any) -> None:
    """Prints a result as JSON."""
    print(json.dumps(data, indent=2))


def check_free(path: pathlib.Path, overwrite: bool) -> None:
    """Checks, before any work, that a file can be written.

    Args:
        path: path of the file.
        overwrite: whether it may replace another.

    Raises:
        UserError: if it is no path of a file, or there already, or its folder is not
            there or not to be written into.
    """
    with files.writing(path):
        try:
            files.check_target(path)
        except ValueError as error:
            raise UserError(str(error)) from error
        if not path.absolute().parent.is_dir():
            raise UserError(
                f"there is no folder {path.parent} to write {path.name} into"
            )
        if path.exists() and not overwrite:
            raise UserError(f"{path} exists; --overwrite replaces it")
    check_writable(path)


def check_writable(path: pathlib.Path) -> None:
    """Checks, before any work, that a path is in a folder that may be written into.

    By a file that has no name, or loses it at once: permissions alone do not tell of
    volumes that are read only, or of what root may not do either.

    Args:
        path: path of a file or folder, whose parent folders may be still to make.

    Raises:
        UserError: if it is not.
    """
    with files.writing(path):
        folder = path.absolute().parent
        while not folder.exists():
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder):
            pass
