"""Private: the command line, ``aqtlite`` and ``python -m aqtlite``.

Each command has a file that declares its options and calls the function of the library
that does the work. JAX is imported when a command runs, not before. Read `app` first.
"""

from aqtlite.cli.app import build_parser, main, run
from aqtlite.cli.commands import COMMANDS, Command

__all__ = ["COMMANDS", "Command", "build_parser", "main", "run"]
