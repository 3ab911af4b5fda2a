"""The command line: ``aqtlite`` and ``python -m aqtlite``."""

from aqtlite.cli.app import build_parser, main, run
from aqtlite.cli.commands import COMMANDS, Command

__all__ = ["COMMANDS", "Command", "build_parser", "main", "run"]
