"""The command ``aqtlite show``."""

import argparse

from aqtlite.checkpoint import contents as contents_lib
from aqtlite.checkpoint import load
from aqtlite.checkpoint.report import table
from aqtlite.cli import factory, output
from aqtlite.errors import UserError


def run(args: argparse.Namespace) -> None:
    """Runs ``aqtlite show``."""
    if args.depth is not None and args.depth < 1:
        raise UserError(f"--depth must be at least 1, got {args.depth}")
    for module in args.modules:
        factory.import_module(module, f"--import {module}")
    contents = contents_lib.contents(args.checkpoint)
    console = output.results()
    if contents.is_converted:
        report = load.summarize(contents.path)
        if args.json:
            output.print_json(report.to_dict())
        else:
            console.print(table(report))
        return
    if args.json:
        output.print_json(contents.to_dict())
        return
    if contents.format is not None:
        print(f"format {contents.format}:\n")
    if contents.steps:
        steps = ", ".join(map(str, contents.steps))
        print(f"steps {steps}; the latest, {contents.path}:\n")
    console.print(contents.table(args.depth))
