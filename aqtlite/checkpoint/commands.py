"""What ``aqtlite convert`` and ``aqtlite show`` run."""

import argparse
import importlib
import json
import logging
import os
import sys
from typing import Any

import rich.console
from flax import linen as nn

from aqtlite import checkpoint, config
from aqtlite.errors import UserError


def convert(args: argparse.Namespace) -> None:
    """Runs ``aqtlite convert``."""
    # Orbax tells every step of a save through absl.
    logging.getLogger("absl").setLevel(logging.ERROR)
    console = _console()
    options: dict[str, Any] = {
        "allow_nonfinite": args.allow_nonfinite,
        "overwrite": args.overwrite,
        "dry_run": args.dry_run,
        "console": console,
    }
    if args.rules is not None:
        for name in ("config", "preset", "fwd_bits", "keep_float"):
            if getattr(args, name):
                raise UserError(
                    f"--{name.replace('_', '-')} goes with --model, not with --rules"
                )
        rules = checkpoint.rules_from_json(_read(args.rules))
        report = checkpoint.convert_by_rules(args.source, args.target, rules, **options)
    else:
        model, sample_args, sample_kwargs = _made(args.model, _config(args))
        try:
            report = checkpoint.convert_checkpoint(
                args.source,
                args.target,
                model,
                *sample_args,
                sample_kwargs=sample_kwargs,
                keep_float=args.keep_float,
                **options,
            )
        except (ValueError, TypeError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(" ".join(str(error).split())) from error
    if args.dry_run:
        console.print(report.table())


def show(args: argparse.Namespace) -> None:
    """Runs ``aqtlite show``."""
    report = checkpoint.summarize(args.checkpoint)
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        _console().print(report.table())


def _console() -> rich.console.Console:
    """As wide as the terminal; wide enough for every table where there is none."""
    return rich.console.Console(width=None if sys.stdout.isatty() else 200)


def _config(args: argparse.Namespace) -> Any:
    if args.fwd_bits is not None and args.preset is None:
        raise UserError("--fwd-bits goes with --preset")
    if args.config is not None:
        try:
            cfg = config.from_json(_read(args.config))
        except (ValueError, TypeError) as error:
            raise UserError(f"{args.config} is no config: {error}") from error
        if not isinstance(cfg, config.DotGeneral):
            raise UserError(f"{args.config} holds a {type(cfg).__name__}")
        return cfg
    bits = 8 if args.fwd_bits is None else args.fwd_bits
    try:
        if args.preset == "fully_quantized":
            return config.fully_quantized(fwd_bits=bits)
        if args.preset == "weight_only":
            return config.weight_only(bits=bits)
    except (ValueError, TypeError) as error:
        raise UserError(f"--fwd-bits {bits}: {error}") from error
    return None


def _read(path: os.PathLike) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _made(name: str, cfg: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What the factory of that name returns."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise UserError(f"--model {name}: write it as package.module:factory")
    # As `python -m` does: modules of the working directory come first.
    sys.path.insert(0, os.getcwd())
    called_with = "nothing" if cfg is None else "the config"
    # What is the user's own may raise anything; -v shows where.
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
        made = factory() if cfg is None else factory(cfg)
    except Exception as error:
        raise UserError(
            f"--model {name} (called with {called_with}) raised "
            f"{type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise UserError(
            f"--model {name} has to return (model, sample_args) or (model, "
            f"sample_args, sample_kwargs), not a {type(made).__name__}"
        )
    model, sample_args, *rest = made
    if not isinstance(sample_args, tuple):
        raise UserError(
            f"--model {name}: sample_args has to be a tuple, not a "
            f"{type(sample_args).__name__}"
        )
    if not isinstance(model, nn.Module):
        raise UserError(
            f"--model {name}: the model has to be a Linen module, not {model!r}"
        )
    if rest and not isinstance(rest[0], dict):
        raise UserError(
            f"--model {name}: sample_kwargs has to be a dict, not {rest[0]!r}"
        )
    return model, sample_args, dict(*rest)
