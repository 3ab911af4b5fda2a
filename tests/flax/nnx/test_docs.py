"""docs/nnx.md runs."""

import pathlib
import re
import runpy

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.code("quick")]

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "nnx.md"


def test_its_blocks_run_in_order(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # The page saves checkpoints.
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    runpy.run_path(str(script))
    assert "P('model', None)" in capsys.readouterr().out
