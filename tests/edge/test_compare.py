import jax
import matplotlib
import numpy as np
import pytest

from aqtlite import edge
from tests.edge import models

pytestmark = pytest.mark.code("quick")


@pytest.fixture(scope="module")
def simulation_and_input():
    model, x = models.Encoder(), models.normal((4, 6, 8))
    variables = models.trained(model, x)
    ranges = edge.calibrate(model, variables, [x])
    # One range is too narrow by half.
    name = "Encoder/Dense_1/fully_connected"
    low, high = ranges[name]
    ranges = ranges.replace({name: (low / 2, high / 2)})
    return edge.simulate(model, variables, ranges, x), x


@pytest.mark.slow
def test_narrow_ranges_are_seen(simulation_and_input):
    simulation, x = simulation_and_input
    found = {d.name: d for d in edge.compare(simulation, x).differences}
    narrow = found["Encoder/Dense_1/fully_connected"]
    assert narrow.clipped > 0.02 and narrow.max_quanta > 20
    first = found["Encoder/Dense_0/fully_connected"]
    assert first.clipped == 0 and first.mean_quanta < 1 and first.decibels > 30
    assert found["input"].max_quanta <= 0.51


def test_tables_and_plots(simulation_and_input):
    matplotlib.use("agg")
    simulation, x = simulation_and_input
    comparison = edge.compare(simulation, x)
    assert "Encoder/Dense_1/gelu" not in str(comparison)
    assert "Encoder/gelu" in str(comparison)
    # In the order of the program.
    assert comparison.differences[0].name == "input"
    assert comparison.differences[1].name == "Encoder/Dense_0/fully_connected"
    (axes,) = comparison.plot().axes
    assert len(axes.patches) == len(comparison.differences)


def test_masks_do_not_count():
    mask = np.tril(np.ones((4, 4), bool))

    def function(w, x):
        return jax.nn.softmax(jax.numpy.where(mask, x @ w, -1e9))

    w, x = models.normal((4, 4)), models.normal((4, 4), 2)
    simulation = edge.simulate(function, w, edge.calibrate(function, w, [x]), x)
    differences = edge.compare(simulation, x).differences
    assert all(d.mean_quanta < 5 and d.clipped < 0.5 for d in differences)
