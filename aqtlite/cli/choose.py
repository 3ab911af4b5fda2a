"""The command ``aqtlite choose``."""

import argparse
import pathlib
from typing import Any

from flax import nnx

from aqtlite import config, rules
from aqtlite.allocation.choose import choose_bits
from aqtlite.checkpoint.load_float import load_float
from aqtlite.checkpoint.variables import tracing_with
from aqtlite.cli import configs, factory, output
from aqtlite.cli.examples import Examples
from aqtlite.cli.shared_options import BITS_OF
from aqtlite.errors import UserError
from aqtlite.output import files, plots


def run(args: argparse.Namespace) -> None:
    """Runs ``aqtlite choose``."""
    for path in filter(None, (args.out, args.plot)):
        output.check_free(path, args.overwrite)
    candidates = _candidates(args.candidates, args.configs)
    if args.plot is not None:
        _check_plot(args.plot)
    model, sample_args, sample_kwargs = factory.call(
        args.model, factory.find(args.model), None
    )
    loss = None if args.loss is None else factory.find(args.loss, "--loss")
    examples = Examples(
        args.calibrate, sample_args, args.batch_size, has_others=loss is not None
    )
    variables = load_float(args.source, model, sample_args, sample_kwargs, args.subtree)
    if isinstance(model, nnx.Module):
        model, variables = nnx.merge(nnx.graphdef(model), variables), None
    with (
        tracing_with(model, sample_args, sample_kwargs),
        output.errors_in_one_line(ValueError, TypeError),
    ):
        found = choose_bits(
            model,
            variables,
            _whole(examples),
            candidates=candidates,
            budget=args.budget.amount,
            unit=args.budget.unit,
            loss=loss,
            num_inputs=len(sample_args),
            **sample_kwargs,
        )
    # What was measured is shown, even if a file cannot be written.
    if args.json:
        print(found.to_json(indent=2))
    else:
        output.results().print(found)
    if args.out is not None:
        text = rules.to_json(found.rules, indent=2) + "\n"
        files.write(text.encode(), args.out)
    if args.plot is not None:
        found.plot(args.plot)


def _check_plot(path: pathlib.Path) -> None:
    """Checks a plot's file before anything is measured."""
    try:
        plots.check_path(path)
    except (ModuleNotFoundError, ValueError) as error:
        raise UserError(f"--plot: {error}") from error


def _candidates(
    names: list[str], paths: list[pathlib.Path]
) -> dict[str, config.DotGeneral]:
    """Returns the candidates by name."""
    found = {}
    for name in names:
        preset, _, bits = name.partition("=")
        chosen = {BITS_OF[preset]: int(bits)} if bits else {}
        found[name] = config.presets()[preset].make(**chosen)
    for path in paths:
        found[path.stem] = configs.from_file(path)
    if len(found) < len(names) + len(paths):
        raise UserError("two candidates have one name: rename a file")
    if not found:
        raise UserError("there is nothing to choose from: --candidates or --config")
    return found


def _whole(examples: Examples) -> list[Any]:
    """Returns the batches, without a last one that is smaller than the others.

    That one would be compiled anew, and weigh as much.
    """
    batches = list(examples)
    left = examples.count % examples.size
    if left and len(batches) > 1:
        output.messages().print(
            f"the last {left} of {examples.count} examples are left out: batches are "
            f"of {examples.size} (--batch-size)"
        )
        batches.pop()
    return batches
