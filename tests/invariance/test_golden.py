"""Logits and trained parameters have one digest on every processor and JAX."""

import json
import os
import subprocess
import sys

import pytest

from tests.invariance import golden

STORED = json.loads((golden.FOLDER / "golden.json").read_text())


@pytest.mark.slow
def test_on_this_processor():
    assert golden.digests(["float32"]) == {"float32": STORED["float32"]}


@pytest.mark.slow
@pytest.mark.parametrize(("processor", "dtype"), [("SSE4_2", "bfloat16")])
def test_on_older_processors(processor, dtype):
    command = [sys.executable, "-m", "tests.invariance.golden", dtype]
    flags = {"XLA_FLAGS": f"--xla_cpu_max_isa={processor}"}
    found = subprocess.run(
        command, env=os.environ | flags, capture_output=True, text=True, check=True
    )
    assert json.loads(found.stdout) == {dtype: STORED[dtype]}
