"""The table of all presets (see `benchmarks.presets`)."""

import numpy as np
import pytest

from aqtlite import config
from benchmarks import presets
from benchmarks.presets import Row

pytestmark = pytest.mark.code("quick")


ROWS = [
    Row("a()", (0.5, 1.5), 3.0, 2.0, 0.25, 1.5, False),
    Row("b()", (-0.25, -0.75), None, 0.5, 0.3, None, True),
]


def test_the_table_is_sorted_by_loss():
    first, second = presets.markdown(ROWS).splitlines()[2:]
    assert first == (
        "| `b()` | -0.5000 (-0.7500 to -0.2500) | after training | 0.50 x | 0.30 x |  "
        "| equal |"
    )
    assert second.endswith("| 3.00 x | 2.00 x | 0.25 x | 1.50 x | differs |")


def test_rows_are_kept_for_the_same_sizes(tmp_path):
    file = tmp_path / "rows.jsonl"
    assert presets.kept(file, presets.QUICK) == presets.kept(None, presets.QUICK) == []
    for row in ROWS:
        presets.keep(file, presets.QUICK, row)
    assert presets.kept(file, presets.QUICK) == ROWS
    assert presets.kept(file, presets.Options()) == []


def test_times_are_ratios_by_turns(monkeypatch):
    clock = [0.0]
    order = []

    def taking(name, seconds):
        while True:
            clock[0] += seconds
            order.append(name)
            yield np.zeros(())

    monkeypatch.setattr(presets.time, "process_time", lambda: clock[0])
    assert presets.ratio(taking("one", 3.0), taking("other", 2.0), 3) == 1.5
    assert order == ["one", "other", "other", "one", "one", "other", "other", "one"]


def test_two_plots(tmp_path):
    presets.plot(ROWS, tmp_path)
    for name in ("presets_time.png", "presets_bytes.png"):
        assert (tmp_path / name).stat().st_size > 1000


def test_every_preset_is_in_the_table():
    assert {name.partition("(")[0] for name in presets.CONFIGS} == {*config.presets()}
    for make in presets.CONFIGS.values():
        assert isinstance(make(), config.DotGeneral)
