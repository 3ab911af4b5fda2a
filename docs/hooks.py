"""Hooks of the site: the README is its first page."""

import pathlib
import re
from typing import Any

README = pathlib.Path(__file__).parent.parent / "README.md"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Puts the README on the first page, and links the pages that a text names."""
    if page.file.src_uri == "index.md":
        # Its links are relative to the folder above.
        markdown = README.read_text().replace("](docs/", "](")
    prefix = "../" * page.file.src_uri.count("/")
    return re.sub(r"`docs/([\w/]+)\.md`", rf"[\1]({prefix}\1.md)", markdown)
