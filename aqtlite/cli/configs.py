"""The config or the rules selected by ``--config``, ``--rules`` or ``--preset``."""

import argparse
import pathlib

from aqtlite import config, rules
from aqtlite.cli.shared_options import BITS_OF
from aqtlite.errors import UserError


def config_of(
    args: argparse.Namespace,
) -> config.DotGeneral | tuple[rules.Rule, ...] | None:
    """Returns the config or the rules selected by the options, or None.

    Raises:
        UserError: if they are not valid.
    """
    if args.config is not None:
        return from_file(args.config)
    if args.rules is not None:
        return _rules_from(args.rules)
    if args.preset is None:
        return None
    return of_preset(args.preset, args.fwd_bits)


def of_preset(name: str, bits: int | None) -> config.DotGeneral:
    """Returns the config of a preset, with the bits of ``--fwd-bits`` if not None.

    Raises:
        UserError: if the preset does not take these bits.
    """
    preset = config.presets()[name]
    if bits is None:
        return preset.make()
    try:
        return preset.make(**{BITS_OF[name]: bits})
    except (ValueError, TypeError) as error:
        raise UserError(f"--fwd-bits {bits}: {error}") from error


def from_file(path: pathlib.Path) -> config.DotGeneral:
    """Reads a config.

    Raises:
        UserError: if the file holds none.
    """
    text = _text_of(path)
    try:
        cfg = config.from_json(text)
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is no config: {error}") from error
    if not isinstance(cfg, config.DotGeneral):
        raise UserError(f"{path} holds a {type(cfg).__name__}")
    return cfg


def _rules_from(path: pathlib.Path) -> tuple[rules.Rule, ...]:
    text = _text_of(path)
    try:
        return rules.from_json(text)
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} holds no rules: {error}") from error


def _text_of(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
