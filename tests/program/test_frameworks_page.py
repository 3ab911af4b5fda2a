"""docs/frameworks.md runs."""

import pathlib
import re
import runpy

import pytest

import aqtlite

pytestmark = [pytest.mark.slow, pytest.mark.code("quick")]

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "frameworks.md"


def test_its_blocks_run_in_order(tmp_path, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    names = runpy.run_path(str(script))
    assert "2 contractions: 2 quantized, 0 in float" in capsys.readouterr().out
    layer = names["serving"]["params"]["mlp/~/linear_0"]
    assert aqtlite.is_frozen(layer["w"]) and layer["b"].shape == (64,)
