"""The page of a report holds its data, and needs nothing else."""

import html.parser
import json
import re

import jax
import jax.numpy as jnp
import pytest

from aqtlite import report
from tests.common import normal

pytestmark = pytest.mark.code("quick")

X, W = normal((8, 16)), normal((16, 4))


class Page(html.parser.HTMLParser):
    """Elements of a page, and the text in those with an id, or of one kind."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.texts, self.attributes = [], set(), {}, []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.attributes += [(tag, *one) for one in attrs]
        self.ids.add(found.get("id"))
        if tag not in ("meta", "input"):
            self.open.append((tag, found.get("id") or tag))

    def handle_endtag(self, tag):
        opened, _ = self.open.pop()
        assert opened == tag

    def handle_data(self, data):
        if self.open:
            name = self.open[-1][1]
            self.texts[name] = self.texts.get(name, "") + data


@pytest.fixture(scope="module")
def found():
    def hostile(x, w):
        with jax.named_scope("</script><script>alert"), jax.named_scope("inner"):
            return x @ w + jnp.sum(x @ w.astype(jnp.bfloat16))

    return report(hostile, X, W)


@pytest.fixture(scope="module")
def page(found, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    found.to_html(path)
    return path.read_text(encoding="utf-8")


def test_the_page_is_well_formed_and_holds_the_report(found, page):
    parsed = Page(page)
    assert not parsed.open
    data = json.loads(parsed.texts["data"])
    assert all(row.pop("notes") is not None for row in data["contractions"])
    assert data == json.loads(found.to_json())
    assert "</script>" in data["contractions"][0]["path"]
    assert "float32[8,16]" in parsed.texts["pre"]


def test_the_page_needs_no_other_file(page):
    parsed = Page(page)
    links = [x for x in parsed.attributes if x[1] in ("src", "href", "srcset")]
    assert not links
    urls = set(re.findall(r"https?://[^\s\"']+", page))
    assert urls <= {"http://www.w3.org/2000/svg"}
    assert "@import" not in page and "url(" not in page


def test_the_script_finds_its_elements_and_data(page):
    parsed = Page(page)
    script = parsed.texts["script"]
    ids = set(re.findall(r"\$\(\"([\w-]+)\"\)", script))
    assert {"shares", "bits", "memory", "filter", "fold"} <= ids <= parsed.ids
    fields = set(re.findall(r"\[\"[\w ]+\", \(x\) => x\.(\w+)", script))
    row = json.loads(parsed.texts["data"])["contractions"][0]
    assert fields and fields <= row.keys()
    # Paths reach the page as text only.
    assert "innerHTML" not in script and "document.write" not in script


def test_light_dark_and_narrow(page):
    style = Page(page).texts["style"]
    assert "prefers-color-scheme: dark" in style
    names = set(re.findall(r"var\((--\w+)\)", style))
    light, dark = re.findall(r":root \{([^}]*)\}", style)
    assert all(f"{name}:" in light and f"{name}:" in dark for name in names)
    assert "width=device-width" in page and "overflow-x: auto" in style


def test_a_folder_that_is_not_there(found, tmp_path):
    with pytest.raises(FileNotFoundError):
        found.to_html(tmp_path / "nowhere" / "report.html")
