"""``python -m tests``: which commands it runs for which parts."""

import subprocess
import sys

import pytest

from tests import __main__ as command

pytestmark = pytest.mark.code("quick")


def pytest_twice(*arguments):
    return [
        (*command.PYTEST, "--code", code, *arguments) for code in ("users", "quick")
    ]


def test_no_arguments_run_the_checks_and_the_quick_tests():
    quick = pytest_twice("-m", "not slow")
    assert command.commands([]) == [*command.CHECKS, command.TYPES, *quick]


def test_all_is_what_the_two_parts_are():
    checks = [*command.CHECKS, command.TYPES]
    assert command.commands(["all", "-x"]) == [*checks, *pytest_twice("-x")]
    assert command.commands(["slow"]) == pytest_twice("-m", "slow")


def test_parts_after_all_and_slow():
    checks = [*command.CHECKS, command.TYPES]
    noise = pytest_twice("tests/noise", "-x")
    assert command.commands(["all", "noise", "-x"]) == [*checks, *noise]
    slow = pytest_twice("-m", "slow", "tests/noise", "-x")
    assert command.commands(["slow", "noise", "-x"]) == slow


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["config"], ["tests/config"]),
        (["config", "demo"], ["tests/config", "tests/demo"]),
        (["noise"], ["tests/noise"]),
        (["aqtlite"], ["aqtlite"]),
        (["tests/noise/test_noise.py::test_a"], ["tests/noise/test_noise.py::test_a"]),
        (["-k", "flax"], ["-k", "flax"]),
        (["noise", "-n", "0", "-x"], ["tests/noise", "-n", "0", "-x"]),
    ],
)
def test_parts_and_options_go_to_pytest(arguments, expected):
    assert command.commands(arguments) == pytest_twice(*expected)


@pytest.mark.parametrize("arguments", [["nosie"], ["slow", "nosie"]])
def test_an_unknown_part_lists_the_parts(arguments, capsys):
    assert command.main(arguments) == 2
    message = capsys.readouterr().err
    assert "no part 'nosie'" in message
    assert "config" in message
    assert "noise" in message


@pytest.mark.slow  # starts two processes
def test_a_part_without_slow_tests_says_so(capfd):
    assert command.main(["slow", "main", "-k", "unknown", "-n", "0"]) == 5
    assert "slow main -k unknown -n 0: no tests were found" in capfd.readouterr().err


def test_help_says_how_long_it_takes_and_runs_nothing(capsys):
    assert command.main(["--help"]) == 0
    assert "minutes on two cores" in capsys.readouterr().out


@pytest.mark.slow  # starts a process
def test_a_module_that_its_package_imports_is_imported_once():
    # Its doctest tells whether a class that the package made is the module's own.
    doctest = "aqtlite/flax/linen/quantize_model.py"
    pytest_of = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    run = subprocess.run((*pytest_of, doctest), cwd=command.ROOT, check=False)
    assert run.returncode == 0
