"""The table of all presets (see `benchmarks.presets`)."""

import pytest

from aqtlite import config
from benchmarks import presets
from benchmarks.presets import Subject

pytestmark = pytest.mark.code("quick")


def subject(name, factor, *, is_trained=True, loss=0.0):
    return Subject(
        name,
        model=None,
        init=print,
        apply=print,
        losses=[1 + loss, 2 + 3 * loss],
        step=print if is_trained else None,
        peak=100 * factor,
        steps=[50.0, factor, 2 * factor] if is_trained else [],
        tokens=[50.0, factor, 2 * factor],
        nbytes=100 * factor,
        is_equal=factor < 3,
    )


SUBJECTS = [
    subject(presets.FLOAT, 1),
    subject("a()", 3, loss=0.5),
    subject("b()", 0.5, is_trained=False, loss=-0.25),
]


def test_rows_are_relative_to_float32():
    first, second = presets.rows(SUBJECTS)
    assert (first.name, second.name) == ("b()", "a()")
    assert first.loss == (-0.5, -0.75, -0.25)
    assert (first.step, first.memory) == (None, None)
    assert (second.step, second.token, second.nbytes, second.memory) == (3, 3, 3, 3)
    table = presets.markdown([first, second]).splitlines()
    assert table[2].startswith("| `b()` | -0.5000 (-0.7500 to -0.2500) |")
    assert "3.00 x | 3.00 x | 3.00 x | 3.00 x | differs" in table[3]


def test_two_plots(tmp_path):
    presets.plot(presets.rows(SUBJECTS), tmp_path)
    for name in ("presets_time.png", "presets_bytes.png"):
        assert (tmp_path / name).stat().st_size > 1000


def test_every_preset_is_in_the_table():
    assert {name.partition("(")[0] for name in presets.CONFIGS} == {*config.presets()}
    for make in presets.CONFIGS.values():
        assert isinstance(make(), config.DotGeneral)
