"""The README works on a code host, on PyPI and as the first page of the site."""

import pathlib
import re
import runpy
import shutil

import pytest
import setuptools

pytestmark = pytest.mark.code("quick")

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def links(text):
    return re.findall(r"\]\(([^)]*)\)", text)


def test_links_lead_to_files():
    assert "docs/choose.md" in links(README)
    for target in links(README):
        assert target.startswith("https://") or (ROOT / target).is_file(), target


@pytest.mark.parametrize("address", [None, "https://example.org/aqtlite/"])
def test_links_are_absolute_on_pypi(address, tmp_path, monkeypatch):
    for name in ("README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    if address is not None:
        with (tmp_path / "pyproject.toml").open("a") as file:
            file.write(f'\n[project.urls]\nRepository = "{address}"\n')
    given = {}
    monkeypatch.setattr(setuptools, "setup", lambda **kwargs: given.update(kwargs))
    runpy.run_path(str(tmp_path / "setup.py"))

    assert given["long_description_content_type"] == "text/markdown"
    page = given["long_description"]
    if address is None:
        assert page == README
    else:
        target = "https://example.org/aqtlite/blob/main/docs/choose.md"
        assert target in links(page)
        assert all(link.startswith("https://") for link in links(page))


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
