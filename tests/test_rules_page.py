"""docs/rules.md runs, and prints what it says."""

import pathlib
import re
import runpy

import jax
import numpy as np
import pytest

import aqtlite

pytestmark = [pytest.mark.slow, pytest.mark.code("quick")]

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "rules.md"


def test_the_page_runs(tmp_path, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    page = runpy.run_path(str(script))
    printed = capsys.readouterr().out
    assert "3 contractions: 2 quantized, 1 in float" in printed
    line = next(one for one in printed.splitlines() if one.startswith("  up "))
    assert line.endswith("int8 x int8")
    assert line in PAGE.read_text()
    assert page["serving"]["params"]["head"].shape == (64, 10)
    line = next(one for one in printed.splitlines() if one.startswith("  experts "))
    assert line.endswith("int8 x int8")
    assert line in PAGE.read_text()
    params = page["serving_experts"]["params"]
    assert all(map(aqtlite.is_frozen, params.values()))
    quantized, serve = page["quantized_experts"], page["serve_experts"]
    np.testing.assert_array_equal(
        jax.jit(serve)(page["serving_experts"], page["rows"]),
        jax.jit(quantized)(page["weights"], page["rows"]),
    )
