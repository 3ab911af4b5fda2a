"""The profile of a compilation has every phase."""

import os
import subprocess
import sys

import pytest

from benchmarks import compile_profile

pytestmark = pytest.mark.slow


def test_every_phase_is_found():
    command = [sys.executable, "-m", "benchmarks.compile_profile", "--blocks", "1"]
    # Nothing is compiled that is found in a cache.
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    out = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    rows = {
        cells[0]: cells[1:]
        for line in out.splitlines()
        if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 3
    }
    for phase in compile_profile.PHASES:
        assert all(float(cell.removesuffix(" ms")) > 0 for cell in rows[phase])
    floats, integers = map(int, rows["kernels"])
    assert 0 < floats < integers
