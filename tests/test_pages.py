"""The code of a page is one program: it runs, and prints what the page says.

A page may begin a block with what readers know already, in a comment of HTML:
`<!-- setup`, lines of Python, and `-->`.
"""

import doctest
import pathlib
import re
import runpy

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.code("quick"), pytest.mark.every_case]

DOCS = pathlib.Path(__file__).parent.parent / "docs"
PAGES = [
    *sorted((DOCS / "how_to").glob("*.md")),
    *(DOCS / f"coming_from_{name}.md" for name in ("qwix", "torchao")),
    *(DOCS / f"{name}.md" for name in ("calibration", "checkpoints", "command_line")),
    *(
        DOCS / f"{name}.md"
        for name in ("contractions", "edge", "formats", "frameworks")
    ),
    *(DOCS / f"{name}.md" for name in ("invariant", "nnx", "numerics", "visibility")),
    DOCS / "qtensor.md",
]
BLOCK = r"^(?:```python|<!-- setup)\n(.*?)^(?:```|-->)$"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_program_of_a_page(page, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    blocks = re.findall(BLOCK, text, re.M | re.S)
    assert blocks
    program = tmp_path / "program.py"
    program.write_text("\n".join(blocks))
    runpy.run_path(str(program), run_name="__main__")
    wanted = "".join(re.findall(r"^```text\n(.*?)^```", text, re.M | re.S))
    printed = capsys.readouterr().out
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert not wanted or doctest.OutputChecker().check_output(wanted, printed, flags)
