"""Metadata that pyproject.toml cannot hold: the README as the page on PyPI.

Links of the README are relative, so that they work in every copy of the repository.
PyPI shows the README alone: its links are made absolute with the address that
`[project.urls]` gives as `Repository`, if there is one.
"""

import pathlib
import re
import tomllib

import setuptools

ROOT = pathlib.Path(__file__).parent


def page() -> str:
    """The README, with absolute links if the address of the repository is known."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    repository = metadata["project"].get("urls", {}).get("Repository")
    if repository is None:
        return text
    files = f"{repository.rstrip('/')}/blob/main/"
    return re.sub(r"\]\((?!https?:|#)", f"]({files}", text)


setuptools.setup(long_description=page(), long_description_content_type="text/markdown")
