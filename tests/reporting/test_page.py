"""The page of a report holds its data, and needs nothing else."""

import html.parser
import json
import re

import jax
import jax.numpy as jnp
import pytest

import aqtlite
from aqtlite import config, report
from tests.common import normal
from tests.reporting import browser

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


OPERAND = aqtlite.quantize(W, config.qat(4).fwd.rhs, 0)


@pytest.fixture(scope="module")
def page(found, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    dot_general = aqtlite.make_dot_general(config.qat(4))
    _, taps = aqtlite.tap_against_float(
        lambda x, w: dot_general(x, w, (((1,), (0,)), ((), ())))
    )(X, W)
    found.to_html(path, taps=taps, operands={"weight": (W, OPERAND)})
    return path.read_text(encoding="utf-8")


def test_the_page_is_well_formed_and_holds_the_report(found, page):
    parsed = Page(page)
    assert not parsed.open
    data = json.loads(parsed.texts["data"])
    assert all(row.pop("notes") is not None for row in data["contractions"])
    [error], [histogram] = data.pop("errors"), data.pop("histograms")
    assert error["name"] == "(no name scope) fwd" and 10 < error["snr"] < 30
    assert sum(histogram["before"]) == sum(histogram["after"]) == W.size
    assert set(histogram["grid"]) <= set(range(-7, 8))
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


def test_operands_that_cannot_be_drawn(found, tmp_path):
    file = tmp_path / "report.html"
    with pytest.raises(TypeError, match="operand 'w' needs its floats and a QTensor"):
        found.to_html(file, operands={"w": (W, W)})
    with pytest.raises(ValueError, match="operand 'w' has the shape"):
        found.to_html(file, operands={"w": (X, OPERAND)})


PATHS = (
    "[...document.querySelectorAll('tr.contraction td.path')].map((x) => x.innerText)"
)


@pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium is on the path")
def test_in_a_browser(page, tmp_path):
    """Clicks sort, filter and fold; nothing is wider than the window, light or dark."""
    file = tmp_path / "report.html"
    file.write_text(page, encoding="utf-8")
    rows = json.loads(Page(page).texts["data"])["contractions"]
    assert len(rows) == 2
    shades = {}
    with browser.running(tmp_path) as tab:
        for width, scheme in ((400, "light"), (1400, "dark")):
            tab.open(file.as_uri(), width, scheme)
            assert tab.value("document.documentElement.scrollWidth") <= width
            assert tab.value("document.querySelectorAll('#histograms rect').length")
            back, text = tab.value(
                "((x) => [x.backgroundColor, x.color])(getComputedStyle(document.body))"
            )
            shades[scheme] = [
                sum(map(int, re.findall(r"\d+", x))) for x in (back, text)
            ]
            # Paths are in the page, and ran no script.
            assert tab.value(PATHS)[0].startswith("</script><script>alert")

            tab.click("th button", "path")
            assert tab.value("document.querySelector('[aria-sort]').ariaSort") == (
                "ascending"
            )
            ordered = tab.value(PATHS)
            assert ordered == sorted(ordered) and len(set(ordered)) == 2
            tab.click("th button", "path")
            assert tab.value(PATHS) == ordered[::-1]

            tab.click("#filter")
            for text, wanted in (
                ("inner#1 float32", ordered[1:]),
                ("nothing of this kind", []),
                ("inner", ordered[::-1]),
            ):
                tab.value("filter.select()")
                tab.write(text)
                assert tab.value(PATHS) == wanted

            module = "document.querySelector('tr.module button').ariaExpanded"
            tab.click("tr.module button")
            assert (tab.value(PATHS), tab.value(module)) == ([], "false")
            tab.click("tr.module button")
            assert (len(tab.value(PATHS)), tab.value(module)) == (2, "true")
            tab.click("label", "fold by module")
            assert tab.value("document.querySelector('tr.module')") is None
            assert len(tab.value(PATHS)) == 2
    (light, ink), (dark, paint) = shades["light"], shades["dark"]
    assert light > 600 > 300 > ink and dark < 150 < 450 < paint


def test_a_folder_that_is_not_there(found, tmp_path):
    with pytest.raises(OSError, match=r"report.html cannot be written: No such file"):
        found.to_html(tmp_path / "nowhere" / "report.html")
