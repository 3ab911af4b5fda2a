"""Private: the command line. `aqtlite.__main__` adds the demo and runs it.

Each command is a thin file over a function of the library. JAX is imported only when a
command runs. Read `app` first.
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
