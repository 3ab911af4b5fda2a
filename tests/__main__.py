"""Runs every check: ``python -m tests [pytest arguments]``.

Format, lint, types, then doctests, notebooks and tests on two processes.
"""

import subprocess
import sys


def main() -> int:
    python = (sys.executable, "-m")
    for command in (
        ("ruff", "format", "--check", "."),
        ("ruff", "check", "."),
        ("mypy",),
        ("pytest", "-n", "2", "-q", *sys.argv[1:]),
    ):
        print("$", *command, flush=True)
        status = subprocess.run((*python, *command), check=False).returncode
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
