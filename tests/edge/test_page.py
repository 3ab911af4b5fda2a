"""docs/edge.md runs."""

import pathlib
import re
import runpy

import pytest

pytestmark = pytest.mark.code("quick")

PAGE = pathlib.Path(__file__).parent.parent.parent / "docs" / "edge.md"


def test_the_page_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    script = tmp_path / "page.py"
    # The last one is the factory of the command line.
    script.write_text("\n".join(block for block in blocks if "factory" not in block))
    page = runpy.run_path(str(script))
    assert page["report"].float_operators == ()
    assert page["edited"]["input"] == (0.0, 1.0)
    assert page["logits"].shape == (8, 10)
    assert "6 operators, 0 of them in float" in capsys.readouterr().out
