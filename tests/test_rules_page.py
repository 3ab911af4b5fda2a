"""docs/rules.md runs, and prints what it says."""

import pathlib
import re
import runpy

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
    assert "8 contractions: 6 quantized, 2 in float" in printed
    assert page["serving"]["params"]["head"].shape == (64, 10)
