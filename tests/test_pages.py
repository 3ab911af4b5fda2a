"""Pages that are a program each: they run, and print what they say."""

import doctest
import pathlib
import re
import runpy

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.code("quick")]

DOCS = pathlib.Path(__file__).parent.parent / "docs"
PAGES = [
    *sorted((DOCS / "how_to").glob("*.md")),
    DOCS / "coming_from_qwix.md",
    DOCS / "coming_from_torchao.md",
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_program_of_a_page(page, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert blocks
    program = tmp_path / "program.py"
    program.write_text("\n".join(blocks))
    runpy.run_path(str(program), run_name="__main__")
    wanted = "".join(re.findall(r"^```text\n(.*?)^```", text, re.M | re.S))
    printed = capsys.readouterr().out
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert not wanted or doctest.OutputChecker().check_output(wanted, printed, flags)
