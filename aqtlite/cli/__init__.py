"""Private: the command line. `aqtlite.__main__` adds the demo, and runs it.

Each command has a file that declares its options and calls the function of the library
that does the work. JAX is imported when a command runs, not before. Read `app` first.
"""

from aqtlite.cli.app import build_parser, main, run
from aqtlite.cli.commands import COMMANDS, EXIT_FAILED, EXIT_OK, Command

__all__ = [
    "COMMANDS",
    "EXIT_FAILED",
    "EXIT_OK",
    "Command",
    "build_parser",
    "main",
    "run",
]
