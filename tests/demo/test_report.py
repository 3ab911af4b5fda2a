"""The demo's table, curves and files."""

import dataclasses
import json
import sys

import matplotlib
import pytest
import rich.console

from aqtlite_demo import report, training

pytestmark = pytest.mark.code("quick")

GOOD = report.Figures(
    validation_loss=2.5,
    step_seconds=0.2,
    checkpoint_bytes=8_000_000,
    bit_exact=True,
    largest_difference=0.0,
    seconds_per_token=0.001,
)
BAD = dataclasses.replace(
    GOOD,
    validation_loss=2.501,
    checkpoint_bytes=2_000_000,
    bit_exact=False,
    largest_difference=0.125,
)


def _shown(*renderables):
    console = rich.console.Console(width=80, record=True, quiet=False, file=sys.stderr)
    console.print(*renderables)
    return console.export_text()


def test_table_sets_the_models_side_by_side():
    shown = _shown(report.table({"float32": GOOD, "int8": BAD}))
    for text in ("float32", "int8 / float32", "+0.0010", "0.25x", "8.0 MB", "200 ms"):
        assert text in shown
    assert "yes" in shown
    assert "NO" in shown


def test_failures_say_what_went_wrong():
    assert report.failures({"float32": GOOD}) == []
    (line,) = report.failures({"int8": BAD})
    assert "int8: what is served is NOT what was trained" in line
    assert "0.125" in line
    diverged = dataclasses.replace(GOOD, validation_loss=float("nan"))
    assert "--lr" in report.failures({"int8": diverged})[0]


def test_sample_shows_brackets_as_they_are():
    assert "a[bold]b" in _shown(report.sample("int8", "a[bold]b"))


def test_figures_are_plain_data_unrounded():
    written = json.loads(json.dumps(report.as_dict({"steps": 3}, {"int8": BAD})))
    assert written["options"] == {"steps": 3}
    assert report.Figures(**written["models"]["int8"]) == BAD


def test_the_conclusion_is_one_sentence():
    slower = dataclasses.replace(GOOD, step_seconds=0.25, validation_loss=2.4)
    found = {"float32": GOOD, "int8": slower}
    assert report.conclusion(found) == (
        "int8 ended 0.1000 nats per token below float32, trained in 1.25 of its time, "
        "is served in 1.00 of its size and 1.00 of its time for a token, and serves "
        "what was trained, bit for bit."
    )


RUNS = {
    "float32": training.Trained(
        None, None, losses=[3.0, 2.0, 1.0], curve=[(1, 2.5), (3, 1.5)]
    ),
    "int8": training.Trained(
        None, None, losses=[3.0, 2.25, 1.0], curve=[(1, 2.5), (3, 2.0)]
    ),
}

FOUND = {"float32": GOOD, "int8": BAD}


def test_curves_are_drawn(tmp_path):
    path = tmp_path / "loss.png"
    assert report.plot(path, RUNS, FOUND)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_curves_have_the_difference_in_a_panel_of_their_own(tmp_path):
    path = tmp_path / "loss.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        assert report.plot(path, RUNS, FOUND)
    drawn = path.read_text()
    assert "float32, train" in drawn
    assert "int8 - float32" in drawn
    for text in ("time per generated token", "1.00 ms", "2.0 MB", "200 ms"):
        assert text in drawn


def test_curves_need_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not report.plot(tmp_path / "loss.png", RUNS, FOUND)
