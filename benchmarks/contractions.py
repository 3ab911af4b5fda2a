"""Time integer contractions, bare and as lowered by aqtlite, against float32.

    python -m benchmarks.contractions [--repeats N] [--json FILE]

Prints median milliseconds for every case of `benchmarks.workloads.contractions`.
"""

import argparse
import json
from typing import Any

from benchmarks.harness import allocator
from benchmarks.harness.options import Options


def main() -> None:
    """Print the table, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", metavar="FILE", help="where to write the figures")
    options = parser.parse_args()
    allocator.keep_memory("benchmarks.contractions")

    from rich.console import Console
    from rich.table import Table

    from benchmarks.workloads import contractions

    rows: list[dict[str, Any]] = []
    for case in contractions.CASES:
        spreads, agree = contractions.measure(case, Options(repeats=options.repeats))
        medians = {name: spreads[name].median * 1e3 for name in contractions.NAMES}
        rows.append({"case": case.name, **medians, "equal": agree})
    table = Table(
        "contraction", *(f"{name}, ms" for name in contractions.NAMES), "integers"
    )
    for row in rows:
        agreement = "equal" if row["equal"] else "differ"
        table.add_row(
            row["case"], *(f"{row[name]:.2f}" for name in contractions.NAMES), agreement
        )
    Console().print(table)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
