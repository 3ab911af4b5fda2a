"""docs/troubleshooting.md quotes messages that the sources have."""

import ast
import pathlib
import re

import pytest

pytestmark = pytest.mark.code("quick")

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()


def literals(tree):
    """Strings of a module, with an ellipsis for what is put into them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                part.value if isinstance(part, ast.Constant) else "..."
                for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def quoted():
    sections = PAGE.split("## Without a message")[0]
    rows = re.findall(r"^\| (.*?) \| .*\|$", sections, re.M)
    return [row.strip("`") for row in rows if row.startswith("`")]


def test_messages_are_those_of_the_sources():
    texts = {
        text
        for path in (ROOT / "aqtlite").rglob("*.py")
        for text in literals(ast.parse(path.read_text()))
    }
    joined = "\n".join(texts)
    messages = quoted()
    assert len(messages) > 25
    missing = [
        message
        for message in messages
        if not re.search(".*".join(map(re.escape, message.split("..."))), joined)
    ]
    assert not missing


def test_each_message_is_there_once():
    messages = quoted()
    assert len(set(messages)) == len(messages)
