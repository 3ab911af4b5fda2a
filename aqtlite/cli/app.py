"""The parser of the command line, and its exit codes."""

import argparse
import io
import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import aqtlite
from aqtlite.cli import interrupts
from aqtlite.cli.commands import COMMANDS, Command
from aqtlite.cli.shared_options import check_local_paths
from aqtlite.cli.suggestions import did_you_mean
from aqtlite.errors import UserError

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141

WIDTH = 78
"""Width of the help in columns."""

_AGAIN = "Run the same command to start over"


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Prints descriptions verbatim, and wraps options at `WIDTH` columns."""

    def __init__(self, prog: str):
        columns = shutil.get_terminal_size().columns - 2
        super().__init__(prog, max_help_position=24, width=min(WIDTH, columns))


class _Parser(argparse.ArgumentParser):
    """Reports usage errors in one line, without the usage text."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Checks the names of options before argparse finds required ones missing.

        Abbreviations are refused: a script that uses one breaks when another option
        begins alike.
        """
        known = list(self._option_string_actions)
        has_commands = self._subparsers is not None
        for word in args or ():
            name = word.partition("=")[0]
            if name == "--" or (has_commands and not name.startswith("-")):
                break  # Positional arguments, or those of a command, follow.
            if name.startswith("--") and name not in known:
                self.error(f"no option {name!r}{did_you_mean(name, known)}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(
            EXIT_USAGE, f"{self.prog}: error: {message} (see '{self.prog} --help')\n"
        )


_EXAMPLES = """\
examples:
  aqtlite demo --smoke       see all of it in a minute
  aqtlite presets            choose a config
  aqtlite show run/3         look into a checkpoint
  aqtlite COMMAND --help     explain a command
"""


def build_parser(commands: Sequence[Command] = COMMANDS) -> argparse.ArgumentParser:
    """Builds the parser of the command line."""
    verbose = _Parser(add_help=False)
    verbose.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        # Not False: a sub-parser's default would overwrite `aqtlite -v demo`.
        default=argparse.SUPPRESS,
        help="show the traceback of an error",
    )
    parser = _Parser(
        prog="aqtlite",
        description="Quantized training and serving for JAX.",
        epilog=_EXAMPLES,
        formatter_class=_Formatter,
        parents=[verbose],
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"aqtlite {aqtlite.__version__}",
        help="print the version and exit",
    )
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", required=True
    )
    for command in commands:
        subparser = subparsers.add_parser(
            command.name,
            help=command.summary,
            description=command.description,
            epilog=f"examples:\n{command.examples}",
            formatter_class=_Formatter,
            parents=[verbose],
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run, parser=parser)
    return parser


def main(
    argv: Sequence[str] | None = None, commands: Sequence[Command] = COMMANDS
) -> int:
    """Runs the command line.

    Args:
        argv: arguments after the program's name; None: those of the process.
        commands: sub-commands.

    Returns:
        The exit code: 0 for success, 1 if the command's own check failed, 2 for user
        errors, 130 after an interrupt, 141 if its output was not read to the end.
        ``--help``, ``--version`` and a malformed command line raise `SystemExit`
        instead, as in argparse.
    """
    parser = build_parser(commands)
    given = sys.argv[1:] if argv is None else argv
    words = [word for word in given if not word.startswith("-")]
    names = [command.name for command in commands]
    if words and words[0] not in names:
        hint = did_you_mean(words[0], names) or f"; there are {', '.join(names)}"
        parser.error(f"no command {words[0]!r}{hint}")
    args = parser.parse_args(given)
    try:
        check_local_paths(args)
        with interrupts.kept():
            code = args.run(args)
            sys.stdout.flush()
        return code
    except UserError as e:
        _print_error(args, e)
        return e.exit_code
    except BrokenPipeError:
        # The reader has what it wants (``aqtlite show ... | head``). The code is that
        # of programs that do not handle SIGPIPE.
        return EXIT_CLOSED_PIPE
    except OSError as e:
        # Of files, errors have a name, and commands say what to do. This is the text
        # that a command prints, to a full disk.
        if e.filename is not None:
            raise
        _print_error(args, f"its output cannot be written: {e.strerror}")
        return EXIT_USAGE
    except KeyboardInterrupt as e:
        notes = getattr(e, "__notes__", [_AGAIN])
        lines = ". ".join(("interrupted", *notes))
        print(f"aqtlite {args.command}: {lines}", file=sys.stderr)
        return EXIT_INTERRUPTED


def _print_error(args: argparse.Namespace, error: object) -> None:
    if getattr(args, "verbose", False):
        traceback.print_exc()
    print(f"aqtlite {args.command}: error: {error}", file=sys.stderr)


def run(commands: Sequence[Command] = COMMANDS) -> NoReturn:
    """Runs the command line of this process, and exits.

    An interrupted process exits without Python's shutdown, in which a compilation still
    running in a JAX thread would use a destroyed client and crash.
    """
    out = sys.stdout  # None if it is closed.
    # A character that its encoding lacks would end a command after the work is done.
    # The locale C has "surrogateescape", which fails for characters, too.
    strict = "strict", "surrogateescape"
    if isinstance(out, io.TextIOWrapper) and out.errors in strict:
        out.reconfigure(errors="backslashreplace")
    code = main(commands=commands)
    if code == EXIT_INTERRUPTED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    try:
        if out is not None:
            out.flush()
    except OSError:
        # `main` has handled it. Python tries again when it ends, and exits with 120.
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
    sys.exit(code)
