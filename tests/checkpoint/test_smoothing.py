"""Checkpoints of models with smoothing: its statistics come from the checkpoint."""

import jax
import pytest

from aqtlite import checkpoint, config
from aqtlite.flax import calibrate, convert
from tests.checkpoint.support import VARIABLES, assert_same, refuses, save
from tests.flax import models
from tests.flax.support import X, apply

pytestmark = pytest.mark.code("quick")

MODEL = models.MlpBlock(config.smoothquant())


@pytest.fixture(scope="module")
def variables():
    x = X.at[:, 1].multiply(50)
    return calibrate(MODEL, VARIABLES, [x])


@pytest.mark.parametrize(
    ("how", "target"), [("msgpack", "out"), ("orbax", "out.safetensors")]
)
def test_served_as_converted_in_memory(variables, how, target, tmp_path):
    source = save(tmp_path / "float", variables, how)
    report = checkpoint.convert_checkpoint(source, tmp_path / target, MODEL, X)
    wanted = convert(MODEL, variables, X)
    loaded = checkpoint.load_serving(tmp_path / target, MODEL)
    assert_same(loaded, wanted)
    assert_same(apply(MODEL, loaded, X), apply(MODEL, variables, X))
    # The noise is that of the smoothed weights.
    assert all(40 < weight.decibels < 50 for weight in report.weights)


def test_statistics_of_no_batch_are_refused(variables, tmp_path):
    empty = jax.tree.map(lambda x: 0 * x, variables["aqt_stats"])
    source = save(tmp_path / "float", {**variables, "aqt_stats": empty}, "msgpack")
    refuses(
        "the statistics of activations have seen no batch",
        checkpoint.convert_checkpoint,
        source,
        tmp_path / "out",
        MODEL,
        X,
    )
