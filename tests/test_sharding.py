"""Meshes of several devices: runs `on_eight_devices.py` where there are as many."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.common import QUICK_FLAGS

pytestmark = [pytest.mark.slow, pytest.mark.every_case]

FILE = pathlib.Path(__file__).with_name("on_eight_devices.py")

TESTS = re.findall(r"^def (test_\w+)", FILE.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def report(pytestconfig):
    """What pytest says there, in a process of its own: devices are counted once."""
    cases = pytestconfig.getoption("cases")
    # Most of the time is compilation.
    flags = f"--xla_force_host_platform_device_count=8 {QUICK_FLAGS}"
    root = FILE.parent.parent
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", str(FILE)),
            *("-q", "-rA", "--tb=short", "-p", "no:cacheprovider"),
            *([] if cases is None else ["--cases", str(cases)]),
        ],
        env={
            **os.environ,
            "XLA_FLAGS": flags,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(root),
        },
        cwd=root,
        capture_output=True,
        text=True,
        timeout=900,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", TESTS)
def test_on_eight_devices(name, report):
    outcomes = re.findall(rf"^(\w+) \S*::{name}(?:\[| |$)", report, re.MULTILINE)
    assert outcomes, report[-5000:]
    assert set(outcomes) == {"PASSED"}, report[-5000:]
