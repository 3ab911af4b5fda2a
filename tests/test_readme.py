"""The README is also the page on PyPI, where relative links lead nowhere."""

import pathlib
import re
import runpy

import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_links_are_absolute_or_to_a_heading():
    targets = re.findall(r"\]\(([^)]*)\)", README)
    headings = re.findall(r"^#+ (.*)$", README, re.M)
    anchors = {"#" + re.sub(r"\W+", "-", heading.lower()) for heading in headings}
    for target in targets:
        assert target.startswith("https://") or target in anchors, target


def test_files_that_it_names_exist():
    named = re.findall(r"`((?:docs|notebooks|\.ci)/[^`]*|[A-Z]+\.md)`", README)
    assert named
    for path in named:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    "module",
    sorted(set(re.findall(r"python -m\s+((?:tests|benchmarks)[\w.]*)", README))),
)
def test_modules_that_it_runs_exist(module):
    path = ROOT.joinpath(*module.split("."))
    assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/ideas.md"])
def test_python_blocks_run_in_order(page, tmp_path):
    text = (ROOT / page).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert blocks
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    runpy.run_path(str(script))


def test_it_fits_on_a_screen_and_a_half():
    assert len(README.split()) <= 1200
