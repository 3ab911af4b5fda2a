"""The command ``aqtlite convert``."""

import argparse
import functools
import pathlib

from aqtlite import checkpoint
from aqtlite.calibration.batches import NothingGathers
from aqtlite.checkpoint.report import table
from aqtlite.cli import factory, output
from aqtlite.cli.configs import config_of
from aqtlite.cli.examples import Examples
from aqtlite.cli.shared_options import STATIC
from aqtlite.errors import UserError


def _moves(path: pathlib.Path | None) -> tuple[checkpoint.Move, ...]:
    if path is None:
        return ()
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--map {path} cannot be read: {error}") from error
    return checkpoint.moves_from_json(text)


def run(args: argparse.Namespace) -> None:
    """Runs ``aqtlite convert``."""
    if not args.dry_run:
        output.check_writable(args.target)
    # First, because the config may name classes that this import registers.
    make = factory.find(args.model)
    model, sample_args, sample_kwargs = factory.call(args.model, make, config_of(args))
    examples = None
    if args.calibrate is not None:
        examples = Examples(args.calibrate, sample_args, args.batch_size)
    converted = functools.partial(
        checkpoint.convert_checkpoint,
        args.source,
        args.target,
        model,
        *sample_args,
        sample_kwargs=sample_kwargs,
        subtree=args.subtree,
        moves=_moves(args.map),
        keep_float=args.keep_float,
        packed=args.packed,
        allow_nonfinite=args.allow_nonfinite,
        overwrite=args.overwrite,
        dry_run=args.dry_run,
        console=output.messages(),
    )
    try:
        try:
            report = converted(calibrate=examples)
        except NothingGathers:
            if args.rules is None:
                raise
            # Of chosen rules, nobody knows beforehand whether they need statistics.
            output.messages().print(
                f"{args.rules} needs no statistics: --calibrate was not needed",
                soft_wrap=True,
            )
            report = converted()
    except (ValueError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        text = " ".join(str(error).split())
        if args.preset in STATIC and args.calibrate is None:
            text += "; or gather them here, with --calibrate data.npz"
        selected = args.preset, args.config, args.rules
        has_config = any(one is not None for one in selected)
        if "nothing to freeze" in text and not has_config:
            text += "; a float model needs --preset or --config"
        raise UserError(text) from error
    if args.json:
        output.print_json(report.to_dict())
    else:
        console = output.results()
        console.print(table(report))
