"""Each example runs."""

import pathlib
import runpy
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.code("quick")]

FOLDER = pathlib.Path(__file__).parent.parent / "examples"
# tests/models runs those that need its extra.
EXAMPLES = sorted({*FOLDER.glob("*.py")} - {*FOLDER.glob("*_tunix.py")})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [path.name, "--smoke"])
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed
    assert "served equals trained: False" not in printed
    assert "sampled as trained: False" not in printed
