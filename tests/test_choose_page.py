"""docs/choose.md has the figures of the tables that it names."""

import pathlib

import pytest

from aqtlite import config
from benchmarks.quality import presets

pytestmark = pytest.mark.code("quick")

DOCS = pathlib.Path(__file__).parent.parent / "docs"
CHOOSE = (DOCS / "choose.md").read_text()
QUALITY = (DOCS.parent / "benchmarks/quality/tables.md").read_text()


def rows(text, head):
    """The cells of the table whose head begins so."""
    lines = text[text.index(head) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


def test_presets_and_figures_are_those_of_the_tables():
    small = QUALITY[QUALITY.index("2 layers of width 64: begin") :]
    losses = {row[0]: row[4] for row in rows(small, "|  | seeds |") if len(row) > 4}
    steps = {name: time for name, _, time in rows(QUALITY, "| | ms | relative |")}
    chosen = rows(CHOOSE, "| preset | in the tables |")
    for code, name, _, _, loss, step in chosen:
        cfg = eval(code.strip("`"), dict(vars(config)))
        assert cfg == presets.CONFIGS[name](), name
        assert losses[name].split(" ±")[0] == loss, name
        assert steps[name] == step, name
    assert len(chosen) >= 20
    assert [float(row[4]) for row in chosen] == sorted(float(row[4]) for row in chosen)
