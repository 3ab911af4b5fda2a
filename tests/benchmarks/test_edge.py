"""A file of integers beside floats and Qwix (see `benchmarks.edge`)."""

import pytest

pytest.importorskip("litert_converter")
pytest.importorskip("ai_edge_litert")

from benchmarks import digits
from benchmarks.edge import __main__ as edge
from benchmarks.edge import models, training

pytestmark = [pytest.mark.slow, pytest.mark.code("quick")]


def test_an_mlp_keeps_its_accuracy_in_a_third_of_the_bytes():
    learned, test = digits.load()
    trained = training.train(models.Mlp, *learned, epochs=2, seed=0)
    found = edge.compare(trained, learned[0][:256], test, rounds=1)
    floats = found[edge.FLOAT]
    assert floats.accuracy > 0.9
    for name in ("aqtlite", "aqtlite, float I/O"):
        ours = found[name]
        assert abs(ours.accuracy - floats.accuracy) <= 0.005
        assert ours.float_operators == [] and (ours.quanta, ours.differing) == (0, 0.0)
        assert ours.size < 0.35 * floats.size
        assert ours.decibels > found["Qwix"].decibels
    assert len(floats.float_operators) == floats.operators
    assert edge.table("MLP", [found]).row_count == 4


def test_a_failure_is_shown():
    shown = edge.table("MLP", [dict.fromkeys(edge.CONTESTANTS, "ValueError: no")])
    assert list(shown.columns[1].cells) == ["failed: ValueError: no"] * 4
