"""The command line: ``aqtlite`` and ``python -m aqtlite``.

A sub-command is one `Command`: how its parser is filled, and what it runs. What a
command needs is imported when it runs, so that ``--help`` stays quick.
"""

import argparse
import dataclasses
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

import aqtlite
from aqtlite import checkpoint_options
from aqtlite.demo import options as demo_options
from aqtlite.errors import UserError

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


@dataclasses.dataclass(frozen=True)
class Command:
    """One sub-command of ``aqtlite``."""

    name: str
    summary: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Takes the parsed arguments, returns the exit code."""


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(
            EXIT_USAGE, f"{self.prog}: error: {message} (see '{self.prog} --help')\n"
        )


def _run_demo(args: argparse.Namespace) -> int:
    options = demo_options.from_arguments(args)
    try:
        from aqtlite.demo import run
    except ModuleNotFoundError as e:
        if e.name is None or e.name.startswith("aqtlite"):
            raise
        raise UserError(
            f"the demo needs the package {e.name!r}: pip install 'aqtlite[demo]'"
        ) from e
    return EXIT_OK if run.run(options) else EXIT_FAILED


def _run_convert(args: argparse.Namespace) -> int:
    from aqtlite.checkpoint import commands

    commands.convert(args)
    return EXIT_OK


def _run_show(args: argparse.Namespace) -> int:
    from aqtlite.checkpoint import commands

    commands.show(args)
    return EXIT_OK


COMMANDS = (
    Command(
        name="demo",
        summary="train, convert and serve a small transformer in float32 and in int8",
        description=demo_options.DESCRIPTION,
        add_arguments=demo_options.add_arguments,
        run=_run_demo,
    ),
    Command(
        name="convert",
        summary="turn the checkpoint of a trained model into one for serving",
        description=checkpoint_options.CONVERT_DESCRIPTION,
        add_arguments=checkpoint_options.add_convert_arguments,
        run=_run_convert,
    ),
    Command(
        name="show",
        summary="list what a converted checkpoint holds",
        description=checkpoint_options.SHOW_DESCRIPTION,
        add_arguments=checkpoint_options.add_show_arguments,
        run=_run_show,
    ),
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
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
        epilog="'aqtlite COMMAND --help' explains a command.",
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
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name,
            help=command.summary,
            description=command.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            parents=[verbose],
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the arguments after the program's name; None takes those of the process.

    Returns:
        The exit code: 0 for success, 1 where the command's own check failed, 2 where
        the user has to change something. ``--help``, ``--version`` and a malformed
        command line raise `SystemExit` instead, as argparse does.
    """
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except UserError as e:
        if getattr(args, "verbose", False):
            traceback.print_exc()
        print(f"aqtlite {args.command}: error: {e}", file=sys.stderr)
        return e.exit_code
    except KeyboardInterrupt:
        print(f"aqtlite {args.command}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
