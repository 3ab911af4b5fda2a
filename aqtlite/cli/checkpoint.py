"""The commands ``aqtlite convert`` and ``aqtlite show``."""

import argparse
import json
import os
import sys
from typing import Any

import rich.console

from aqtlite import checkpoint, config
from aqtlite.checkpoint import table
from aqtlite.cli import checkpoint_options as options
from aqtlite.cli import factory
from aqtlite.errors import UserError

_UNLIMITED = 200
"""Columns of output that is no terminal: no path is shortened there."""


def convert(args: argparse.Namespace) -> None:
    """Runs ``aqtlite convert``."""
    if args.rules is not None:
        raise UserError(
            "--rules is gone: no Flax model could serve what it wrote. Name the model "
            "by --model, and leave weights in float by --keep-float; rules that say "
            "how a model is quantized will come with the model"
        )
    if args.model is None:
        raise UserError("--model is missing: package.module:factory")
    console = _console()
    # Imported before the config is read, which may name classes that it registers.
    make = factory.find(args.model)
    model, sample_args, sample_kwargs = factory.call(args.model, make, _config(args))
    try:
        report = checkpoint.convert_checkpoint(
            args.source,
            args.target,
            model,
            *sample_args,
            sample_kwargs=sample_kwargs,
            subtree=args.subtree,
            keep_float=args.keep_float,
            allow_nonfinite=args.allow_nonfinite,
            overwrite=args.overwrite,
            dry_run=args.dry_run,
            console=console,
        )
    except (ValueError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(" ".join(str(error).split())) from error
    if args.dry_run:
        console.print(table.table(report, console))


def show(args: argparse.Namespace) -> None:
    """Runs ``aqtlite show``."""
    for module in args.modules:
        factory.import_module(module, f"--import {module}")
    report = checkpoint.summarize(args.checkpoint)
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        console = _console()
        console.print(table.table(report, console))


def _console() -> rich.console.Console:
    return rich.console.Console(width=None if sys.stdout.isatty() else _UNLIMITED)


def _config(args: argparse.Namespace) -> Any:
    if args.fwd_bits is not None and args.preset not in options.BITS_OF:
        raise UserError(f"--fwd-bits goes with --preset {' or '.join(options.BITS_OF)}")
    if args.config is not None:
        try:
            cfg = config.from_json(_read(args.config))
        except (ValueError, TypeError) as error:
            raise UserError(f"{args.config} is no config: {error}") from error
        if not isinstance(cfg, config.DotGeneral):
            raise UserError(f"{args.config} holds a {type(cfg).__name__}")
        return cfg
    if args.preset is None:
        return None
    if args.preset not in options.BITS_OF:
        return getattr(config, args.preset)()
    bits = 8 if args.fwd_bits is None else args.fwd_bits
    try:
        return getattr(config, args.preset)(**{options.BITS_OF[args.preset]: bits})
    except (ValueError, TypeError) as error:
        raise UserError(f"--fwd-bits {bits}: {error}") from error


def _read(path: os.PathLike) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
