"""The documentation as a site: it builds, and has every public name."""

import importlib
import pathlib
import subprocess
import sys
import zlib

import pytest

import aqtlite

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "docs", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


def reference(site):
    """The names in the API reference."""
    data = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {line.split()[0] for line in zlib.decompress(data).decode().splitlines()}


@pytest.mark.slow
def test_first_page_is_the_readme_with_links(site):
    page = (site / "index.html").read_text()
    assert "What is trained is what is served, bit for bit" in page
    assert 'href="serving/"' in page


@pytest.mark.slow
def test_examples_of_the_reference_are_code(site):
    page = (site / "api" / "config" / "index.html").read_text()
    assert '<span class="gp">' in page
    assert "<blockquote>" not in page


@pytest.mark.slow
def test_reference_has_every_public_name(site):
    names = reference(site)
    modules = [*(f"aqtlite.{name}" for name in aqtlite.__dir__()), "aqtlite.flax.nnx"]
    for module in ["aqtlite", *modules]:
        try:
            public = importlib.import_module(module)
        except ModuleNotFoundError:
            continue  # a name of the package, looked for below
        for name in getattr(public, "__all__", []):
            # A function of the name of its module is listed as a part of that.
            found = {f"{module}.{name}", f"{module}.{name}.{name}"} & names
            assert found or name == "__version__", f"{module}.{name}"
