"""Integers of onnxruntime beside training's (see `benchmarks.edge.rounding`)."""

import re

import pytest

from benchmarks.edge import rounding

pytestmark = [pytest.mark.slow, pytest.mark.code("quick")]


def test_an_mlp_differs_by_one_quantum_at_most():
    line = rounding.measure("MLP in NNX", seed=0, epochs=1)
    quanta, share = re.search(r"(\d+) quanta, (.*?)% of", line).groups()
    assert int(quanta) <= 1 and float(share) < 1
