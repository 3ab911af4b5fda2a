"""The program ``aqtlite``, also ``python -m aqtlite``: the command line and the demo.

Only this file imports both: nothing in the library imports the demo.
"""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from aqtlite import cli
from aqtlite.errors import UserError
from aqtlite_demo import options as demo_options


def _run_demo(args: argparse.Namespace) -> int:
    options = demo_options.from_arguments(args)
    try:
        from aqtlite_demo import run
    except ModuleNotFoundError as e:
        if e.name is None or e.name.startswith("aqtlite"):
            raise
        raise UserError(
            f"the demo needs the package {e.name!r}: pip install {e.name}, or in a "
            "clone of aqtlite pip install -e '.[demo]'"
        ) from e
    return cli.EXIT_OK if run.run(options) else cli.EXIT_FAILED


COMMANDS = (
    cli.Command(
        name="demo",
        summary="train, convert and serve a small transformer in float32 and in int8",
        description=demo_options.DESCRIPTION,
        examples=demo_options.EXAMPLES,
        add_arguments=demo_options.add_arguments,
        run=_run_demo,
    ),
    *cli.COMMANDS,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program in this process, with the arguments and result of `cli.main`."""
    return cli.main(argv, COMMANDS)


def run() -> NoReturn:
    """Runs the program and exits the process."""
    cli.run(COMMANDS)


if __name__ == "__main__":
    run()
