"""The sub-commands of ``aqtlite``, without the demo.

A command's module is imported when the command runs, so that ``--help`` is quick.
"""

import argparse
import dataclasses
import importlib
from collections.abc import Callable

from aqtlite.cli import (
    checkpoint_options,
    choose_options,
    completion,
    config_options,
    edge_options,
    generate_options,
    report_options,
    shared_options,
)

EXIT_OK = 0
EXIT_FAILED = 1


@dataclasses.dataclass(frozen=True)
class Command:
    """One sub-command of ``aqtlite``."""

    name: str
    summary: str
    description: str
    examples: str
    """Example command lines with explanations, at the end of the help."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Function from the parsed arguments to the exit code."""


def _runs(module: str) -> Callable[[argparse.Namespace], int]:
    """A function that imports a command's module and runs the command."""

    def run(args: argparse.Namespace) -> int:
        shared_options.check(args)
        importlib.import_module(f"aqtlite.cli.{module}").run(args)
        return EXIT_OK

    return run


COMMANDS = (
    Command(
        name="presets",
        summary="list the configs that most start from, or explain one",
        description=config_options.PRESETS_DESCRIPTION,
        examples=config_options.PRESETS_EXAMPLES,
        add_arguments=config_options.add_presets_arguments,
        run=_runs("presets"),
    ),
    Command(
        name="plan",
        summary="list the contractions of a model, and how each would run",
        description=config_options.PLAN_DESCRIPTION,
        examples=config_options.PLAN_EXAMPLES,
        add_arguments=config_options.add_plan_arguments,
        run=_runs("plan"),
    ),
    Command(
        name="report",
        summary="say what the compiled program of a model contracts in which dtypes",
        description=report_options.DESCRIPTION,
        examples=report_options.EXAMPLES,
        add_arguments=report_options.add_arguments,
        run=_runs("report"),
    ),
    Command(
        name="choose",
        summary="choose bits for each weight of a trained model, under a budget",
        description=choose_options.DESCRIPTION,
        examples=choose_options.EXAMPLES,
        add_arguments=choose_options.add_arguments,
        run=_runs("choose"),
    ),
    Command(
        name="convert",
        summary="turn the checkpoint of a trained model into one for serving",
        description=checkpoint_options.CONVERT_DESCRIPTION,
        examples=checkpoint_options.CONVERT_EXAMPLES,
        add_arguments=checkpoint_options.add_convert_arguments,
        run=_runs("convert"),
    ),
    Command(
        name="show",
        summary="list what a checkpoint holds",
        description=checkpoint_options.SHOW_DESCRIPTION,
        examples=checkpoint_options.SHOW_EXAMPLES,
        add_arguments=checkpoint_options.add_show_arguments,
        run=_runs("show"),
    ),
    Command(
        name="edge",
        summary="write a trained model into a file of integers for LiteRT or ONNX",
        description=edge_options.DESCRIPTION,
        examples=edge_options.EXAMPLES,
        add_arguments=edge_options.add_arguments,
        run=_runs("edge"),
    ),
    Command(
        name="generate",
        summary="continue a text with a language model of Hugging Face or GGUF",
        description=generate_options.DESCRIPTION,
        examples=generate_options.EXAMPLES,
        add_arguments=generate_options.add_arguments,
        run=_runs("generate"),
    ),
    Command(
        name="completion",
        summary="print a script that has a shell complete command lines",
        description=completion.DESCRIPTION,
        examples=completion.EXAMPLES,
        add_arguments=completion.add_arguments,
        run=_runs("completion"),
    ),
)
