"""Arguments shared by several commands, and checks before JAX is imported."""

import argparse
import contextlib
import pathlib
from typing import Any

from aqtlite.cli.suggestions import one_of
from aqtlite.errors import UserError
from aqtlite.output.local_paths import check_local

_FILES: Any = None
"""shtab's completion of paths, if installed."""
with contextlib.suppress(ModuleNotFoundError):
    import shtab

    _FILES = shtab.FILE

BITS_OF = {
    "fully_quantized": "fwd_bits",
    "weight_only": "bits",
    "qat": "bits",
    "lsq": "bits",
    "lsq_weight_only": "bits",
    "gptq": "bits",
}
"""Presets with a bit width, and the name of that argument."""

STATIC = ("gptq", "static_int8", "smoothquant")
"""Presets that need statistics of activations."""

LEARNED = ("lsq", "lsq_weight_only")
"""Presets with scales that training learns."""

_OTHERS = ("w4a8", "fp8", "mxfp8", "mxfp6", "mxfp4", "mxint8", "nvfp4", "block_fp8")

PRESETS = tuple(dict.fromkeys((*BITS_OF, *STATIC, *_OTHERS)))
"""Quantizing presets of `aqtlite.config`, listed here to avoid importing JAX."""


def add_path(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    *names: str,
    **kwargs: Any,
) -> None:
    """Adds a path argument with shell completion."""
    action = parser.add_argument(*names, type=pathlib.Path, **kwargs)
    action.complete = _FILES  # type: ignore[attr-defined]


def add_model(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Adds ``--model``; returns the group of required options."""
    required = parser.add_argument_group("required options")
    required.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        required=True,
        type=place,
        help="a function that returns (model, sample_args[, sample_kwargs]), as "
        "package.module:factory or path/to/file.py:factory",
    )
    return required


def add_config(parser: argparse.ArgumentParser, use: str) -> None:
    """Adds ``--config``, ``--rules``, ``--preset`` and ``--fwd-bits``.

    Args:
        parser: parser to extend.
        use: purpose of the config, for the help.
    """
    add_path(
        add_one_config(parser, use),
        "--rules",
        metavar="FILE",
        help="rules for the float model of the factory (aqtlite.rules.to_json, "
        "'aqtlite choose')",
    )


def add_one_config(
    parser: argparse.ArgumentParser, use: str
) -> argparse._MutuallyExclusiveGroup:
    """Adds ``--config``, ``--preset`` and ``--fwd-bits``, as `add_config` does.

    Returns:
        The group of those that exclude each other.
    """
    how = parser.add_mutually_exclusive_group()
    add_path(
        how,
        "--config",
        metavar="FILE.json",
        help=f"a config (aqtlite.config.to_json), {use}",
    )
    how.add_argument(
        "--preset",
        type=_preset,
        choices=PRESETS,
        metavar="NAME",
        help=f"a preset of aqtlite.config, {use}; 'aqtlite presets' lists them",
    )
    parser.add_argument(
        "--fwd-bits",
        metavar="N",
        type=int,
        help=f"bits of the forward contraction, of {', '.join(BITS_OF)}",
    )
    return how


def _preset(name: str) -> str:
    """Checks the name of a preset.

    Raises:
        argparse.ArgumentTypeError: if it is none, or has a number of bits.
    """
    preset, has_bits, bits = name.partition("=")
    if has_bits and preset in BITS_OF:
        raise argparse.ArgumentTypeError(
            f"{name!r}: write --preset {preset} --fwd-bits {bits}"
        )
    return one_of("preset", PRESETS)(name)


def add_examples(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    use: str,
    **kwargs: Any,
) -> None:
    """Adds ``--calibrate``.

    Args:
        parser: parser or argument group to extend.
        use: purpose of the examples, for the help.
        **kwargs: further arguments of `add_argument`.
    """
    help_text = f"examples, {use}"
    add_path(parser, "--calibrate", metavar="FILE.npz", help=help_text, **kwargs)


def add_batch_size(parser: argparse.ArgumentParser) -> None:
    """Adds ``--batch-size``."""
    parser.add_argument(
        "--batch-size",
        metavar="N",
        type=int,
        default=32,
        help="examples that the model is given at once, in calibration (default "
        "%(default)s)",
    )


def add_subtree(parser: argparse.ArgumentParser) -> None:
    """Adds ``--subtree``."""
    parser.add_argument(
        "--subtree",
        metavar="PATH",
        action="append",
        default=[],
        help="the part of SOURCE that holds the variables, such as params of a "
        "training state (repeatable)",
    )


def add_overwrite(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds ``--overwrite``."""
    parser.add_argument("--overwrite", action="store_true", help=f"replace {what}")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json``."""
    parser.add_argument(
        "--json", action="store_true", help="print JSON in place of a table"
    )


def check(args: argparse.Namespace) -> None:
    """Checks the arguments as far as possible without JAX.

    Raises:
        UserError: if a file is missing, or options cannot be combined.
    """
    names = (
        "source",
        "checkpoint",
        "config",
        "calibrate",
        "ranges",
        "rules",
        "tokenizer",
    )
    paths = [getattr(args, name, None) for name in names]
    for path in (*paths, *getattr(args, "configs", ())):
        if path is not None and not path.exists():
            raise UserError(f"{path} does not exist")
    if getattr(args, "fwd_bits", None) is not None and args.preset not in BITS_OF:
        raise UserError(f"--fwd-bits goes with --preset {' or '.join(BITS_OF)}")


def check_local_paths(args: argparse.Namespace) -> None:
    """Checks that all paths of a command line are local ones.

    Raises:
        UserError: if one is an address, or begins with ``~``.
    """
    for value in vars(args).values():
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, pathlib.Path):
                try:
                    check_local(path)
                except ValueError as error:
                    raise UserError(str(error)) from error


def place(name: str) -> str:
    """Checks the name of a function, ``package.module:name`` or ``file.py:name``.

    Raises:
        argparse.ArgumentTypeError: if it is no such name, or there is no such file.
    """
    module, colon, attribute = name.rpartition(":")
    if not (module and colon and attribute.isidentifier()):
        raise argparse.ArgumentTypeError(
            f"{name!r} names no factory: write package.module:factory, or "
            "path/to/file.py:factory"
        )
    if module.endswith(".py") and not pathlib.Path(module).is_file():
        raise argparse.ArgumentTypeError(f"the file {module} does not exist")
    return name
