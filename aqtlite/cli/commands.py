"""The sub-commands of ``aqtlite`` that the library has.

The modules that a command needs are imported when it runs, so that ``--help`` is quick.
"""

import argparse
import dataclasses
from collections.abc import Callable

from aqtlite.cli import checkpoint_options, edge_options

EXIT_OK = 0
EXIT_FAILED = 1


@dataclasses.dataclass(frozen=True)
class Command:
    """One sub-command of ``aqtlite``."""

    name: str
    summary: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Takes the parsed arguments, returns the exit code."""


def _run_convert(args: argparse.Namespace) -> int:
    from aqtlite.cli import checkpoint

    checkpoint.convert(args)
    return EXIT_OK


def _run_show(args: argparse.Namespace) -> int:
    from aqtlite.cli import checkpoint

    checkpoint.show(args)
    return EXIT_OK


def _run_edge(args: argparse.Namespace) -> int:
    from aqtlite.cli import edge

    edge.run(args)
    return EXIT_OK


COMMANDS = (
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
    Command(
        name="edge",
        summary="write a trained model into a file of integers for LiteRT or ONNX",
        description=edge_options.DESCRIPTION,
        add_arguments=edge_options.add_arguments,
        run=_run_edge,
    ),
)
