"""The command ``aqtlite completion``."""

import argparse

from aqtlite.errors import UserError

SHELLS = ("bash", "zsh", "fish", "tcsh")


DESCRIPTION = """\
Print a script that has a shell complete commands, options, presets and paths.
It needs the package shtab: pip install 'aqtlite[completion]'.
"""

EXAMPLES = """\
  eval "$(aqtlite completion bash)"      in ~/.bashrc
  aqtlite completion zsh > ~/.zfunc/_aqtlite
  aqtlite completion fish > ~/.config/fish/completions/aqtlite.fish
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``aqtlite completion``."""
    parser.add_argument(
        "shell", metavar="SHELL", choices=SHELLS, help=" or ".join(SHELLS)
    )


def run(args: argparse.Namespace) -> None:
    """Prints the shell completion script.

    Args:
        args: parsed arguments, with the parser of the whole command line.

    Raises:
        UserError: if shtab is not installed.
    """
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise UserError(
            "completion needs the package 'shtab': pip install 'aqtlite[completion]'"
        ) from error
    print(shtab.complete(args.parser, args.shell))
