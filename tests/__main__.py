"""Run the checks: ``python -m tests [PART ...] [pytest options]``.

  python -m tests                   format, lint, types, doctests, and the quick tests
  python -m tests slow              the others: training, random models, new processes,
                                    notebooks, comparisons with AQT, Qwix, LiteRT, ONNX,
                                    and most cases of tests that have many
  python -m tests all               both; .ci/run leaves out a few benchmarks, and of
                                    each test all cases but one
  python -m tests flax checkpoint   tests/flax and tests/checkpoint, slow ones too
  python -m tests slow flax         the slow tests of tests/flax
  python -m tests noise -k unbiased  of tests/noise, those named so
  python -m tests aqtlite           the doctests

The first time, the quick part takes about 12 minutes on two cores of an x86-64 machine
with nothing else to do, and all take about 28. Most of that is XLA compiling: later
runs find the compiled programs in .jax_cache and take less. How far they are and how
long they will take is printed.
Tests run on two processes: ``-n 4`` is for machines with more cores, ``-n 0`` for a
debugger. The tests run in two groups: programs of the first are compiled as users
compile, those of the second in a quarter of the time (see tests/pytest_code.py).
"""

import pathlib
import subprocess
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parent.parent

CHECKS = (
    ("ruff", "format", "--check", "."),
    ("ruff", "check", "."),
)
# Takes one core for 20 seconds, and the tests that begin meanwhile the other.
TYPES = ("mypy",)
# The tests of a file run in one process, so that what they share, programs and
# fixtures, is made once; files in the order of tests/conftest.py, not by their number
# of tests, which says little of how long they take.
PYTEST = (
    *("pytest", "-p", "tests.pytest_progress", "-p", "tests.pytest_code", "-q"),
    *("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"),
)
CODES = ("users", "quick")  # see `tests.pytest_code`
QUICK = ("-m", "not slow")
SLOW = ("-m", "slow")
_NO_TESTS = 5  # exit status of pytest that was to run none


def commands(arguments: Sequence[str]) -> list[tuple[str, ...]]:
    """The modules to run with ``python -m``, with their arguments.

    Args:
        arguments: parts, then options of pytest; without any, the checks and the
            tests that are quick.

    Raises:
        ValueError: if there is no such part.
    """
    if not arguments:
        return [*CHECKS, TYPES, *_pytest(*QUICK)]
    if arguments[0] == "all":
        return [*CHECKS, TYPES, *_pytest(*_with_paths(arguments[1:]))]
    if arguments[0] == "slow":
        return _pytest(*SLOW, *_with_paths(arguments[1:]))
    return _pytest(*_with_paths(arguments))


def _with_paths(arguments: Sequence[str]) -> list[str]:
    """Returns parts, as paths, and the options of pytest after them."""
    options = [i for i, text in enumerate(arguments) if text.startswith("-")]
    first_option = min(options, default=len(arguments))
    paths = [_path(name) for name in arguments[:first_option]]
    return [*paths, *arguments[first_option:]]


def _pytest(*arguments: str) -> list[tuple[str, ...]]:
    return [(*PYTEST, "--code", code, *arguments) for code in CODES]


def _path(part: str) -> str:
    """Path of a part, which is a folder or file of tests, or any other path."""
    for path in (f"tests/{part}", f"tests/test_{part}.py", part):
        if (ROOT / path).exists() or (ROOT / path.partition("::")[0]).is_file():
            return path
    raise ValueError(f"no part {part!r}; there are {', '.join(parts())}")


def parts() -> list[str]:
    """Names of the folders of tests, and of the files beside them."""
    tests = ROOT / "tests"
    folders = {path.parent.name for path in tests.glob("*/test_*.py")}
    files = {path.stem.removeprefix("test_") for path in tests.glob("test_*.py")}
    return ["all", "slow", "aqtlite", *sorted(folders), *sorted(files)]


def main(arguments: Sequence[str]) -> int:
    """Run the checks up to the first that fails, then both groups of tests.

    Types are checked beside the first group.
    """
    if "-h" in arguments or "--help" in arguments:
        print(__doc__)
        return 0
    try:
        asked = commands(arguments)
    except ValueError as error:
        print(f"python -m tests: {error}", file=sys.stderr)
        return 2
    if not arguments:
        print(__doc__, flush=True)
    failed, without_tests, types = 0, 0, None
    for command in asked:
        print("$", *command, flush=True)
        process = subprocess.Popen((sys.executable, "-m", *command), cwd=ROOT)
        if command == TYPES:
            types = process
            continue
        status = process.wait()
        if command in CHECKS and status:
            return status
        if status == _NO_TESTS:
            without_tests += 1
        else:
            failed = failed or status
    if types is not None and types.wait():
        print("mypy has found errors, which are above.", file=sys.stderr)
        failed = failed or types.returncode
    if failed:
        return failed
    if without_tests == len(CODES):
        text = " ".join(arguments)
        print(f"python -m tests {text}: no tests were found", file=sys.stderr)
        return _NO_TESTS
    if not arguments:
        print("The slow tests are left: python -m tests slow")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
