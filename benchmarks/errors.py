"""Compare the errors of int8 contractions and gradients with those of the peers.

    python -m benchmarks.errors [--draws N]

Prints the mean relative errors of `benchmarks.workloads.errors`. Needs the `test`
extra, which installs aqtp and qwix.
"""

import argparse

import jax
from rich.console import Console
from rich.table import Table

from benchmarks.workloads import errors


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=errors.DRAWS)
    draws = parser.parse_args().draws
    table = Table("data", "library", *errors.RESULTS)
    for kind in errors.KINDS:
        for name, dot in errors.dots().items():
            row = errors.errors(dot, kind, jax.random.key(0), draws)
            table.add_row(kind, name, *(f"{value:.2%}" for value in row.tolist()))
    Console().print(table)


if __name__ == "__main__":
    main()
