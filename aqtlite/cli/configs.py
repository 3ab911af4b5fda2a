"""The config selected by ``--config`` or ``--preset``."""

import argparse
import pathlib

from aqtlite import config
from aqtlite.cli.shared_options import BITS_OF
from aqtlite.errors import UserError


def config_of(args: argparse.Namespace) -> config.DotGeneral | None:
    """Returns the config selected by the options, or None.

    Raises:
        UserError: if the config is not valid.
    """
    if args.config is not None:
        return _from_file(args.config)
    if args.preset is None:
        return None
    preset = config.presets()[args.preset]
    if args.fwd_bits is None:
        return preset.make()
    try:
        return preset.make(**{BITS_OF[args.preset]: args.fwd_bits})
    except (ValueError, TypeError) as error:
        raise UserError(f"--fwd-bits {args.fwd_bits}: {error}") from error


def _from_file(path: pathlib.Path) -> config.DotGeneral:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    try:
        cfg = config.from_json(text)
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is no config: {error}") from error
    if not isinstance(cfg, config.DotGeneral):
        raise UserError(f"{path} holds a {type(cfg).__name__}")
    return cfg
