"""Text between marker lines of a page of the documentation."""

import pathlib
from collections.abc import Mapping


class PageError(Exception):
    """A page cannot be read or written; the message has the reason."""


def markers(name: str) -> tuple[str, str]:
    """The lines before and after a text."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def write(path: pathlib.Path, texts: Mapping[str, str]) -> None:
    """Put texts between their markers.

    Args:
        path: the page.
        texts: texts by the name in their markers.

    Raises:
        PageError: if the page lacks markers; nothing is written then.
    """
    page = _page(path)
    for name, text in texts.items():
        first, last = markers(name)
        before, _, after = _parts(path, page, name)
        page = f"{before}{first}\n\n{text}\n\n{last}{after}"
    path.write_text(page)


def read(path: pathlib.Path, name: str) -> str:
    """The text between the markers with a name.

    Raises:
        PageError: if the page lacks them.
    """
    return _parts(path, _page(path), name)[1].strip()


def _page(path: pathlib.Path) -> str:
    return path.read_text() if path.exists() else ""


def _parts(path: pathlib.Path, page: str, name: str) -> tuple[str, str, str]:
    """The parts of a page before, between and after markers."""
    first, last = markers(name)
    before, begin, rest = page.partition(first)
    between, end, after = rest.partition(last)
    if not (begin and end):
        raise PageError(f"{path} needs the lines {first} and {last}")
    return before, between, after
